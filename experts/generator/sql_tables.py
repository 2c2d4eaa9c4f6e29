"""Tables of a row: some entities of a domain, some of their fields, named in one of several styles."""

from __future__ import annotations

from dataclasses import dataclass

from experts.generator.dice import Dice
from experts.generator.domains import Domain, Entity, Field
from experts.generator.naming import camel

_TYPES = {"int": "INTEGER", "year": "INTEGER", "money": "REAL", "rating": "REAL", "date": "DATE", "bool": "BOOLEAN"}


@dataclass(frozen=True)
class Naming:
    """Naming convention of one schema; a model that memorized one convention fails on the others."""

    plural_tables: bool
    camel_columns: bool
    long_ids: bool  # book_id instead of id

    def table(self, entity: Entity) -> str:
        return entity.plural_name if self.plural_tables else entity.name

    def column(self, name: str) -> str:
        return camel(name) if self.camel_columns else name

    def own_id(self, entity: Entity) -> str:
        return self.column(f"{entity.name}_id") if self.long_ids else "id"

    def foreign_id(self, entity: Entity) -> str:
        return self.column(f"{entity.name}_id")


@dataclass(frozen=True)
class Table:
    entity: Entity
    fields: tuple[Field, ...]
    naming: Naming
    references: tuple[Entity, ...] = ()
    has_id: bool = True

    @property
    def name(self) -> str:
        return self.naming.table(self.entity)

    @property
    def id(self) -> str:
        return self.naming.own_id(self.entity)

    @property
    def key(self) -> str:
        return self.column(self.entity.key)

    def column(self, field: Field) -> str:
        return self.naming.column(field.name)

    def render(self) -> str:
        own = [f"{self.id} INTEGER PRIMARY KEY"] if self.has_id else []
        columns = [f"{self.column(field)} {_type_of(field)}" for field in self.fields]
        foreign = [
            f"{self.naming.foreign_id(entity)} INTEGER REFERENCES "
            f"{self.naming.table(entity)}({self.naming.own_id(entity)})"
            for entity in self.references
        ]
        return f"CREATE TABLE {self.name} ({', '.join(own + columns + foreign)});"


def _type_of(field: Field) -> str:
    return _TYPES.get(field.kind, "TEXT") + ("" if field.optional else " NOT NULL")


@dataclass(frozen=True)
class Context:
    """Tables that a question may use. `main` is its subject; the others are optional."""

    domain: Domain
    main: Table
    parent: Table | None = None
    other: Table | None = None
    record: Table | None = None

    def render(self) -> str:
        tables = (self.parent, self.main, self.other, self.record)
        return "\n".join(table.render() for table in tables if table is not None)


def draw_naming(dice: Dice) -> Naming:
    return Naming(plural_tables=dice.chance(0.6), camel_columns=dice.chance(0.2), long_ids=dice.chance(0.4))


def draw_fields(dice: Dice, entity: Entity, count: int) -> tuple[Field, ...]:
    """Draw up to `count` fields including the key, in the entity's order."""
    return (entity.key, *dice.subset(entity.fields[1:], count - 1))


def draw_single(dice: Dice, domain: Domain) -> Context:
    entity = dice.choice((domain.child, domain.child, domain.child, domain.parent, domain.other))
    return Context(domain, Table(entity, draw_fields(dice, entity, dice.between(4, 6)), draw_naming(dice)))


def draw_pair(dice: Dice, domain: Domain) -> Context:
    naming = draw_naming(dice)
    return Context(
        domain,
        main=Table(domain.child, draw_fields(dice, domain.child, dice.between(3, 5)), naming, (domain.parent,)),
        parent=Table(domain.parent, draw_fields(dice, domain.parent, dice.between(2, 4)), naming),
    )


def draw_triple(dice: Dice, domain: Domain) -> Context:
    naming = draw_naming(dice)
    record = domain.meets.record
    assert record is not None
    return Context(
        domain,
        main=Table(domain.child, draw_fields(dice, domain.child, dice.between(2, 4)), naming),
        other=Table(domain.other, draw_fields(dice, domain.other, dice.between(2, 3)), naming),
        record=Table(record, record.fields, naming, (domain.other, domain.child), has_id=False),
    )
