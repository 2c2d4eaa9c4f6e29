"""What generated rows have to show of a question: values at the edges of its conditions, and which columns join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.quality.sql_facts import Condition, Facts, Place, Schema, Value
from launcher.quality.sql_values import make_edges, split

Row = dict[str, Value]  # by column, in lower case
Rows = dict[str, list[Row]]  # by table, in lower case


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """A schema and the facts of its statements, ready to make rows from."""

    schema: Schema
    facts: Facts
    order: tuple[str, ...]  # tables, parents before their children
    links: Mapping[str, Mapping[str, Place]]  # by table: columns that hold a value of another table
    inside: Mapping[Place, list[Value]]  # values that meet the conditions of a column
    outside: Mapping[Place, list[Value]]

    def conditioned(self, table: str) -> list[str]:
        return [
            column
            for column in self.schema[table].columns
            if (table, column) in self.inside and column not in self.links[table]
        ]

    def may_be_orphan(self, table: str, column: str) -> bool:
        return self.schema[table].columns[column].nullable or column not in self.schema[table].parents

    def edges(self, table: str, column: str) -> list[Value]:
        return [*self.inside[table, column], *self.outside[table, column]]


def make_needs(schema: Schema, facts: Facts, checks: Sequence[Condition]) -> Needs:
    links = _make_links(schema, facts)
    by_place: dict[Place, list[Condition]] = {}
    for condition in (*facts.conditions, *checks):
        table, column = condition.place
        place = links[table].get(column, condition.place)  # the value of a foreign key is its parent's
        by_place.setdefault(place, []).append(condition)
    inside: dict[Place, list[Value]] = {}
    outside: dict[Place, list[Value]] = {}
    for place, conditions in by_place.items():
        column_of = schema[place[0]].columns[place[1]]
        edges = list(dict.fromkeys(edge for condition in conditions for edge in make_edges(condition, column_of)))
        inside[place], outside[place] = split(conditions, edges)
    return Needs(
        schema=schema,
        facts=facts,
        order=_parents_first(schema, links),
        links=links,
        inside=inside,
        outside=outside,
    )


def _make_links(schema: Schema, facts: Facts) -> dict[str, dict[str, Place]]:
    """FOREIGN KEYs, and columns that the statements compare: towards the unique one, else towards the earlier table."""
    links = {
        name: {column: place for column, place in table.parents.items() if _exists(schema, place) and place[0] != name}
        for name, table in schema.items()
    }
    places = list(schema)
    for one, other in facts.links:
        if links[one[0]].get(one[1]) == other or links[other[0]].get(other[1]) == one:
            continue
        one_unique, other_unique = (schema[table].columns[column].unique for table, column in (one, other))
        forward = other_unique if one_unique != other_unique else places.index(one[0]) > places.index(other[0])
        child, parent = (one, other) if forward else (other, one)
        if child[1] not in links[child[0]] and parent[1] not in links[parent[0]]:
            links[child[0]][child[1]] = parent
    return links


def _exists(schema: Schema, place: Place) -> bool:
    return place[0] in schema and place[1] in schema[place[0]].columns


def _parents_first(schema: Schema, links: dict[str, dict[str, Place]]) -> tuple[str, ...]:
    """Where tables refer to one another in a circle, links that close it are dropped from `links`."""
    done: list[str] = []
    while len(done) < len(schema):
        waiting = [name for name in schema if name not in done]
        ready = [name for name in waiting if all(place[0] in done for place in links[name].values())]
        if not ready:
            first = waiting[0]
            links[first] = {column: place for column, place in links[first].items() if place[0] in done}
            ready = [first]
        done += ready
    return tuple(done)
