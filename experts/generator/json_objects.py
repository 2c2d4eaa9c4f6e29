"""Objects that JSON rows describe: items with a key, a schema and a value, nested one level deep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experts.generator.dice import Dice
from experts.generator.domains import WHOLE_KINDS, Domain, Entity, Field
from experts.generator.naming import camel
from experts.generator.values import draw_value

Json = Any  # a JSON value, as the json module returns it
_TYPES = {"int": "integer", "year": "integer", "money": "number", "rating": "number", "bool": "boolean"}


@dataclass(frozen=True, slots=True)
class Style:
    """Conventions of one schema, which a model has to read from it."""

    is_camel: bool
    is_null: bool  # a missing value is null; otherwise its key is omitted

    def name(self, name: str) -> str:
        return camel(name) if self.is_camel else name


@dataclass(frozen=True)
class Item:
    """One field of an object. Without a value it is null, or omitted if `required` is off."""

    field: Field
    key: str
    value: Json
    required: bool

    @property
    def is_missing(self) -> bool:
        return self.value is None

    def schema(self) -> Json:
        if self.field.kind == "one":
            options: list[str | None] = list(self.field.options)
            return {"enum": [*options, None] if self.field.optional and self.required else options}
        kind = _TYPES.get(self.field.kind, "string")
        shape: dict[str, Json] = {"type": [kind, "null"] if self.field.optional and self.required else kind}
        if self.field.kind == "date":
            shape["format"] = "date"
        return shape


@dataclass(frozen=True)
class Record:
    entity: Entity
    items: tuple[Item, ...]

    def value(self) -> Json:
        return {item.key: item.value for item in self.items if item.required or not item.is_missing}

    def schema(self) -> Json:
        return {
            "type": "object",
            "properties": {item.key: item.schema() for item in self.items},
            "required": [item.key for item in self.items if item.required],
        }


@dataclass(frozen=True)
class Whole:
    """A record, perhaps with another inside it, or a list of them, or a list of names."""

    record: Record
    part_key: str = ""
    parts: tuple[Record, ...] = ()
    is_list: bool = False
    is_names: bool = False

    def value(self) -> Json:
        inside = [part.items[0].value if self.is_names else part.value() for part in self.parts]
        return self.record.value() | ({self.part_key: inside if self.is_list else inside[0]} if self.parts else {})

    def schema(self) -> Json:
        schema = self.record.schema()
        if self.parts:
            inside = self.parts[0].items[0].schema() if self.is_names else self.parts[0].schema()
            schema["properties"][self.part_key] = {"type": "array", "items": inside} if self.is_list else inside
            schema["required"].append(self.part_key)
        return schema


def dump(tree: Json) -> str:
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def draw_whole(dice: Dice, domain: Domain) -> Whole:
    style = Style(is_camel=dice.chance(0.4), is_null=dice.chance(0.5))
    kind = dice.choice(("flat", "flat", "object", "list", "names"))
    if kind == "flat":
        entity = dice.choice((domain.child, domain.child, domain.other))
        return Whole(draw_record(dice, entity, dice.between(3, 5), style))
    if kind == "object":
        inner = draw_record(dice, domain.parent, dice.between(2, 3), style)
        outer = draw_record(dice, domain.child, dice.between(2, 4), style)
        return Whole(outer, style.name(domain.parent.name), (inner,))
    if kind == "names":
        outer = draw_record(dice, domain.child, dice.between(2, 4), style)
        people = [draw_record(dice, domain.other, 1, style) for _ in range(dice.between(2, 4))]
        return Whole(outer, style.name(domain.other.plural_name), tuple(people), is_list=True, is_names=True)
    outer = draw_record(dice, domain.parent, dice.between(2, 3), style)
    fields = draw_fields(dice, domain.child, 2)
    parts = tuple(make_record(dice, domain.child, fields, style) for _ in range(dice.between(2, 3)))
    return Whole(outer, style.name(domain.child.plural_name), parts, is_list=True)


def draw_fields(dice: Dice, entity: Entity, count: int) -> tuple[Field, ...]:
    return (entity.key, *dice.subset(entity.fields[1:], min(count, len(entity.fields)) - 1))


def draw_record(dice: Dice, entity: Entity, count: int, style: Style) -> Record:
    return make_record(dice, entity, draw_fields(dice, entity, count), style)


def make_record(dice: Dice, entity: Entity, fields: Sequence[Field], style: Style) -> Record:
    return Record(entity, tuple(_make_item(dice, field, style) for field in fields))


def _make_item(dice: Dice, field: Field, style: Style) -> Item:
    missing = field.optional and dice.chance(0.5)
    return Item(
        field=field,
        key=style.name(field.name),
        value=None if missing else _draw_json_value(dice, field),
        required=style.is_null or not field.optional,
    )


def _draw_json_value(dice: Dice, field: Field) -> Json:
    value = draw_value(dice, field)
    is_whole = isinstance(value, float) and field.kind not in WHOLE_KINDS and value == int(value)
    return int(value) if is_whole else value
