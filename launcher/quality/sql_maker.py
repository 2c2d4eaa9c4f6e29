"""Rows under construction: what is asked for is given, everything else is filled in plainly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.quality.sql_facts import Place, Value
from launcher.quality.sql_needs import Needs, Row, Rows
from launcher.quality.sql_values import make_plain

NULL_SHARE = 0.15
MANY = 400  # a LIMIT or a COUNT beyond needs more rows than a judge has time for
_FIRST_NUMBER = 20  # texts of unique columns count from here: below, words repeat


@dataclass(slots=True)
class Maker:
    """Rows under construction. `plain` numbers the values of columns without a condition."""

    needs: Needs
    dice: random.Random
    plain: Callable[[int, int], int]  # number of the row and of the column -> number of the value
    has_nulls: bool = True
    rows: Rows = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {table: [] for table in self.needs.order}

    def witness(self, table: str) -> Row:
        """Values that meet every condition on the table. Unique columns take theirs once, elsewhere."""
        columns = self.needs.schema[table].columns
        return {
            column: self.dice.choice(self.needs.inside[table, column])
            for column in self.needs.conditioned(table)
            if not columns[column].unique
        }

    def stranger(self, table: str) -> Row:
        """Values that meet no condition."""
        columns = self.needs.schema[table].columns
        return {
            column: self.dice.choice(self.needs.outside[table, column] or self.needs.inside[table, column])
            for column in self.needs.conditioned(table)
            if not columns[column].unique
        }

    def add(self, table: str, given: Row) -> Row:
        """Completes a row: what is not given is plain, and links lead to any parent."""
        row: Row = {}
        number = len(self.rows[table])
        for index, (name, column) in enumerate(self.needs.schema[table].columns.items()):
            if name in given:
                row[name] = given[name]
            elif name in self.needs.links[table]:
                row[name] = self._link(self.needs.links[table][name])
            elif column.unique:
                row[name] = self._unique(table, name, index, number)
            elif column.nullable and self.has_nulls and self.dice.random() < NULL_SHARE:
                row[name] = None
            else:
                row[name] = make_plain(column.kind, index, self.plain(number, index))
        self.rows[table].append(row)
        return row

    def add_family(self, table: str, given: Row) -> Row:
        """A row with parents of its own, which meet their conditions."""
        links: Row = {}
        for parent in dict.fromkeys(place[0] for place in self.needs.links[table].values()):
            columns = [column for column, place in self.needs.links[table].items() if place[0] == parent]
            if not all(column in given for column in columns):
                links |= self.links_to(table, parent, self.add_family(parent, self.witness(parent)))
        return self.add(table, links | given)

    def _link(self, place: Place) -> Value:
        parents = self.rows[place[0]]
        return self.dice.choice(parents)[place[1]] if parents else None

    def _unique(self, table: str, name: str, index: int, number: int) -> Value:
        column = self.needs.schema[table].columns[name]
        if column.kind in ("int", "bool"):
            return 1000 * (self.needs.order.index(table) + 1) + number
        return make_plain(column.kind, index, _FIRST_NUMBER + number)

    def links_to(self, table: str, parent: str, row: Row) -> Row:
        return {column: row[at] for column, (name, at) in self.needs.links[table].items() if name == parent}
