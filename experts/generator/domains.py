"""Domains: entities, their fields and the links between them, parsed from the text of `domain_data`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

Kind = Literal[
    "person", "title", "company", "code", "email", "city", "country", "one", "int", "year", "money", "rating", "date",
    "bool",
]  # fmt: skip
TEXT_KINDS = frozenset({"person", "title", "company", "code", "email", "city", "country", "one"})
CATEGORY_KINDS = frozenset({"city", "country", "one"})  # few values, so that grouping by them makes sense
NUMBER_KINDS = frozenset({"int", "year", "money", "rating"})
WHOLE_KINDS = frozenset({"int", "year"})
_UNITS = frozenset({"kg", "km", "cm", "mg", "mw", "sqm", "sqkm", "m", "gb"})


@dataclass(frozen=True, slots=True)
class Field:
    name: str  # snake_case
    kind: Kind
    low: int = 0
    high: int = 0
    options: tuple[str, ...] = ()  # of kind one
    optional: bool = False

    @property
    def words(self) -> str:
        """`weight in kg` of weight_kg, `date released` of released_on."""
        *stem, end = self.name.split("_")
        if stem and end in _UNITS:
            return f"{' '.join(stem)} in {end}"
        return f"date {' '.join(stem)}" if stem and end == "on" else self.name.replace("_", " ")

    @property
    def is_text(self) -> bool:
        return self.kind in TEXT_KINDS

    @property
    def is_category(self) -> bool:
        return self.kind in CATEGORY_KINDS and not self.optional

    @property
    def is_number(self) -> bool:
        return self.kind in NUMBER_KINDS

    @property
    def is_quantity(self) -> bool:
        """A number that may be summed and averaged; years may not."""
        return self.is_number and self.kind != "year"


@dataclass(frozen=True)
class Entity:
    name: str  # snake_case
    plural_name: str
    fields: tuple[Field, ...]

    @property
    def key(self) -> Field:
        """The field that names an entity."""
        return self.fields[0]

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    @property
    def key_words(self) -> str:
        """`author name`, but `policy code` rather than `policy policy code`."""
        key = self.key.words
        return key if key.startswith(self.words) else f"{self.words} {key}"

    @property
    def plural(self) -> str:
        return self.plural_name.replace("_", " ")


@dataclass(frozen=True)
class Link:
    source: str
    forward: str  # WROTE
    backward: str  # WRITTEN_BY
    target: str
    record: Entity | None = None  # of many to many: the table between, or the properties of the relationship

    @property
    def active(self) -> str:
        return self.forward.lower().replace("_", " ")

    @property
    def passive(self) -> str:
        return self.backward.lower().replace("_", " ")


@dataclass(frozen=True)
class Domain:
    """`parent` is linked to many `child`; `other` and `child` are linked many to many; `loop` leads to its own kind."""

    name: str
    entities: tuple[Entity, ...]
    links: tuple[Link, ...]

    @cached_property
    def parent(self) -> Entity:
        return self.entities[0]

    @cached_property
    def child(self) -> Entity:
        return self.entities[1]

    @cached_property
    def other(self) -> Entity:
        return self.entities[2]

    @property
    def owns(self) -> Link:
        return self.links[0]

    @property
    def meets(self) -> Link:
        return self.links[1]

    @property
    def loop(self) -> Link:
        return self.links[2]


_FIELD = re.compile(r"(?P<name>[a-z_]+)(?P<optional>\??)=(?P<kind>[a-z]+)(?:\((?P<range>[^)]*)\))?")


def load_domains(text: str) -> tuple[Domain, ...]:
    joined = text.replace("\n  ", " ")
    return tuple(_read_domain(paragraph.strip().split("\n")) for paragraph in joined.strip().split("\n\n"))


def _read_domain(lines: Sequence[str]) -> Domain:
    name, *rest = lines
    entities = tuple(_read_entity(line) for line in rest[:3])
    domain = Domain(name, entities, tuple(_read_link(line) for line in rest[3:]))
    _check_domain(domain)
    return domain


def _read_entity(line: str) -> Entity:
    names, _, fields = line.partition(": ")
    singular, plural = names.split("/")
    return Entity(singular, plural, tuple(_read_field(field) for field in fields.split()))


def _read_field(text: str) -> Field:
    match = _FIELD.fullmatch(text)
    assert match, text
    kind = next(kind for kind in get_args(Kind) if kind == match["kind"])
    options = tuple((match["range"] or "").split(","))
    optional = bool(match["optional"])
    if kind == "one":
        return Field(match["name"], kind, options=options, optional=optional)
    low, high = (int(options[0]), int(options[1])) if match["range"] else (0, 0)
    return Field(match["name"], kind, low, high, optional=optional)


def _read_link(line: str) -> Link:
    source, verbs, target, *record = line.split(" ", 3)
    forward, backward = verbs.split("/")
    return Link(source, forward, backward, target, _read_entity(record[0]) if record else None)


def _check_domain(domain: Domain) -> None:
    """Check the properties on which the row makers rely."""
    assert len(domain.links) == 3, domain.name
    assert (domain.owns.source, domain.owns.target) == (domain.parent.name, domain.child.name), domain.name
    assert (domain.meets.source, domain.meets.target) == (domain.other.name, domain.child.name), domain.name
    assert domain.meets.record, domain.name
    assert domain.loop.source == domain.loop.target, domain.name
    for entity in domain.entities:
        assert entity.key.is_text, (domain.name, entity.name)
        assert not entity.key.optional, (domain.name, entity.name)
        assert len({field.name for field in entity.fields}) == len(entity.fields) >= 4, (domain.name, entity.name)
    fields = domain.child.fields
    assert {"date", "bool"} <= {field.kind for field in fields}, domain.name
    assert any(field.is_category for field in fields), domain.name
    assert sum(field.is_quantity for field in fields) >= 2, domain.name
