"""Types that a TypeScript instruction gives: interfaces of entities, with the fields and spellings of one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experts.generator.conditions import SIGNS, Condition
from experts.generator.dice import Dice
from experts.generator.domains import Domain, Entity, Field
from experts.generator.naming import camel, pascal
from experts.generator.values import Value, format_number

_TYPES = {"int": "number", "year": "number", "money": "number", "rating": "number", "bool": "boolean"}


def quote(value: Value) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"'
    return str(value).lower() if isinstance(value, bool) else format_number(value)


@dataclass(frozen=True)
class Shape:
    """One interface."""

    entity: Entity
    fields: tuple[Field, ...]
    id_type: str  # string or number
    has_null: bool  # an optional value is null instead of undefined
    owner: Entity | None = None  # referred to by its id

    @property
    def name(self) -> str:
        return pascal(self.entity.name)

    @property
    def item(self) -> str:
        return camel(self.entity.name)

    @property
    def items(self) -> str:
        return camel(self.entity.plural_name)

    @property
    def plural(self) -> str:
        return pascal(self.entity.plural_name)

    @property
    def key(self) -> str:
        return self.property(self.entity.key)

    @property
    def missing(self) -> str:
        return "null" if self.has_null else "undefined"

    def property(self, field: Field) -> str:
        return camel(field.name)

    def type_of(self, field: Field) -> str:
        """Return the type of a field, without null or undefined."""
        return " | ".join(map(quote, field.options)) if field.kind == "one" else _TYPES.get(field.kind, "string")

    def member(self, field: Field) -> str:
        kind = self.type_of(field)
        if field.optional:
            return f"{self.property(field)}: {kind} | null" if self.has_null else f"{self.property(field)}?: {kind}"
        return f"{self.property(field)}: {kind}"

    def members(self) -> list[str]:
        owner = [f"{camel(self.owner.name)}Id: {self.id_type}"] if self.owner else []
        return [f"id: {self.id_type}", *map(self.member, self.fields), *owner]

    def render(self) -> str:
        return render_interface(self.name, self.members())

    def draw(self, dice: Dice, test: Callable[[Field], bool]) -> Field | None:
        fitting = [field for field in self.fields if test(field)]
        return dice.choice(fitting) if fitting else None

    def draw_quantity(self, dice: Dice) -> Field | None:
        return self.draw(dice, lambda field: field.is_quantity)

    def draw_category(self, dice: Dice) -> Field | None:
        return self.draw(dice, lambda field: field.is_category)


def render_interface(name: str, members: list[str]) -> str:
    return "\n".join([f"interface {name} {{", *(f"  {member};" for member in members), "}"])


def draw_shape(dice: Dice, entity: Entity, owner: Entity | None = None) -> Shape:
    count = dice.between(3, min(5, len(entity.fields))) if owner is None else 3
    fields = (entity.key, *dice.subset(entity.fields[1:], count - 1))
    return Shape(entity, fields, dice.choice(("string", "number")), dice.chance(0.5), owner)


def draw_any(dice: Dice, domain: Domain) -> Shape:
    return draw_shape(dice, dice.choice((domain.child, domain.child, domain.child, domain.parent, domain.other)))


def render_condition(condition: Condition, shape: Shape, name: str) -> str:
    op, values = condition.op, [quote(value) for value in condition.values]
    if op in SIGNS:
        return f"{name} {SIGNS[op]} {values[0]}"
    if op in ("null", "not_null"):
        return f"{name} {'===' if op == 'null' else '!=='} {shape.missing}"
    return f"[{', '.join(values)}].includes({name})" if op == "in" else _CONDITIONS[op].format(name, *values)


_CONDITIONS: dict[str, str] = {
    "eq": "{0} === {1}",
    "ne": "{0} !== {1}",
    "between": "{0} >= {1} && {0} <= {2}",
    "contains": "{0}.includes({1})",
    "starts": "{0}.startsWith({1})",
    "ends": "{0}.endsWith({1})",
    "year": '{0}.startsWith("{1}-")',
    "true": "{0}",
    "false": "!{0}",
}
