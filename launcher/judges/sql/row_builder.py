"""Requirements on generated rows (boundary values, joined columns), and the builder that completes rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.judges.sql.boundary_values import make_boundary_values, make_plain_value, pad_texts, split_by_match
from launcher.judges.sql.query_analysis import ColumnRef, Condition, QueryFacts, Schema, Value

Row = dict[str, Value]  # by column, in lower case
Rows = dict[str, list[Row]]  # by table, in lower case


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRequirements:
    """What generated rows must cover: tables, their references, and values that satisfy or violate each condition."""

    schema: Schema
    facts: QueryFacts
    order: tuple[str, ...]  # tables, parents first
    links: Mapping[str, Mapping[str, ColumnRef]]  # by table: columns that refer to another table
    inside: Mapping[ColumnRef, list[Value]]  # values that satisfy the conditions of a column
    outside: Mapping[ColumnRef, list[Value]]

    def list_conditioned(self, table: str) -> list[str]:
        """Return the columns of a table that have conditions and do not refer to another table."""
        return [
            column
            for column in self.schema[table].columns
            if (table, column) in self.inside and column not in self.links[table]
        ]

    def can_be_orphan(self, table: str, column: str) -> bool:
        """Return whether a referring column may have no parent row."""
        return self.schema[table].columns[column].nullable or column not in self.schema[table].parents

    def boundary_values(self, table: str, column: str) -> list[Value]:
        """Return all boundary values of a column."""
        return [*self.inside[table, column], *self.outside[table, column]]


def make_requirements(schema: Schema, facts: QueryFacts, checks: Sequence[Condition]) -> RowRequirements:
    """Derive the requirements on rows from a schema, the facts of statements and CHECK constraints."""
    links = _make_links(schema, facts)
    by_column: dict[ColumnRef, list[Condition]] = {}
    for condition in (*facts.conditions, *checks):
        table, column = condition.column
        column_ref = links[table].get(column, condition.column)  # a foreign key takes its parent's value
        by_column.setdefault(column_ref, []).append(condition)
    inside: dict[ColumnRef, list[Value]] = {}
    outside: dict[ColumnRef, list[Value]] = {}
    for column_ref, conditions in by_column.items():
        column_type = schema[column_ref[0]].columns[column_ref[1]]
        boundary_values = list(
            dict.fromkeys(edge for condition in conditions for edge in make_boundary_values(condition, column_type))
        )
        inside[column_ref], outside[column_ref] = split_by_match(conditions, boundary_values)
        if any(condition.operator == "length" for condition in conditions):
            others = [condition for condition in conditions if condition.operator != "length"]
            matching, _ = split_by_match(others, boundary_values)
            padded = pad_texts([text for text in matching if isinstance(text, str)][:4], conditions)
            edges = list(dict.fromkeys((*boundary_values, *padded)))
            inside[column_ref], outside[column_ref] = split_by_match(others, edges)
    return RowRequirements(
        schema=schema,
        facts=facts,
        order=_parents_first(schema, links),
        links=links,
        inside=inside,
        outside=outside,
    )


def _make_links(schema: Schema, facts: QueryFacts) -> dict[str, dict[str, ColumnRef]]:
    """Return which columns refer to which: FOREIGN KEYs, and joined columns.

    Of two joined columns, the unique one is referred to, or else the one in the earlier table.
    """
    links = {
        name: {
            column: column_ref
            for column, column_ref in table.parents.items()
            if _exists(schema, column_ref) and column_ref[0] != name
        }
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


def _exists(schema: Schema, column_ref: ColumnRef) -> bool:
    return column_ref[0] in schema and column_ref[1] in schema[column_ref[0]].columns


def _parents_first(schema: Schema, links: dict[str, dict[str, ColumnRef]]) -> tuple[str, ...]:
    """Return the tables in topological order, parents first; references that close a cycle are removed from `links`."""
    done: list[str] = []
    while len(done) < len(schema):
        waiting = [name for name in schema if name not in done]
        ready = [name for name in waiting if all(column_ref[0] in done for column_ref in links[name].values())]
        if not ready:
            first = waiting[0]
            links[first] = {column: column_ref for column, column_ref in links[first].items() if column_ref[0] in done}
            ready = [first]
        done += ready
    return tuple(done)


NULL_SHARE = 0.15
MAX_COUNT = 400  # larger LIMITs and COUNTs would need too many rows
_FIRST_NUMBER = 20  # strings of unique columns are numbered from here; below, words repeat


@dataclass(slots=True)
class RowBuilder:
    """Builds rows of test databases: given values are used, all other columns are filled in."""

    needs: RowRequirements
    rng: random.Random
    value_number: Callable[[int, int], int]  # row number, column number -> number of the plain value
    has_nulls: bool = True
    rows: Rows = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {table: [] for table in self.needs.order}

    def make_matching_row(self, table: str) -> Row:
        """Return values that satisfy every condition on a table, except those of unique columns."""
        return self._choose_values(table, self.needs.inside)

    def make_nonmatching_row(self, table: str) -> Row:
        """Return values that satisfy no condition on a table."""
        return self._choose_values(table, self.needs.outside)

    def _choose_values(self, table: str, values: Mapping[ColumnRef, list[Value]]) -> Row:
        columns = self.needs.schema[table].columns
        return {
            column: self.rng.choice(values[table, column] or self.needs.inside[table, column])
            for column in self.needs.list_conditioned(table)
            if not columns[column].unique
        }

    def add(self, table: str, values: Row) -> Row:
        """Add a row and fill in its other columns; references point to any parent row."""
        row: Row = {}
        number = len(self.rows[table])
        for index, (name, column) in enumerate(self.needs.schema[table].columns.items()):
            if name in values:
                row[name] = values[name]
            elif name in self.needs.links[table]:
                row[name] = self._link(self.needs.links[table][name])
            elif column.unique:
                row[name] = self._unique(table, name, index, number)
            elif column.nullable and self.has_nulls and self.rng.random() < NULL_SHARE:
                row[name] = None
            else:
                row[name] = make_plain_value(column.kind, index, self.value_number(number, index))
        self.rows[table].append(row)
        return row

    def add_with_parents(self, table: str, values: Row) -> Row:
        """Add a row with new parent rows that satisfy their conditions."""
        links: Row = {}
        for parent in dict.fromkeys(column_ref[0] for column_ref in self.needs.links[table].values()):
            columns = [column for column, column_ref in self.needs.links[table].items() if column_ref[0] == parent]
            if not all(column in values for column in columns):
                links |= self.link_columns(table, parent, self.add_with_parents(parent, self.make_matching_row(parent)))
        return self.add(table, links | values)

    def _link(self, column_ref: ColumnRef) -> Value:
        parents = self.rows[column_ref[0]]
        return self.rng.choice(parents)[column_ref[1]] if parents else None

    def _unique(self, table: str, name: str, index: int, number: int) -> Value:
        column = self.needs.schema[table].columns[name]
        if column.kind in ("int", "bool"):
            return 1000 * (self.needs.order.index(table) + 1) + number
        return make_plain_value(column.kind, index, _FIRST_NUMBER + number)

    def link_columns(self, table: str, parent: str, row: Row) -> Row:
        """Return the values of the columns that refer to a row of a parent table."""
        return {column: row[at] for column, (name, at) in self.needs.links[table].items() if name == parent}
