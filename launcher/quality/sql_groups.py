"""Rows for HAVING: groups whose size or average lies just below, on and just above what is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.quality.sql_facts import GroupCondition
from launcher.quality.sql_maker import MANY, Maker
from launcher.quality.sql_needs import Needs, Row, Rows
from launcher.quality.sql_values import make_plain

_MAX_ROWS = 4_000
_SPREAD = 50
_TWIN_NUMBER = _SPREAD + 1  # of values that no other group has


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows of one group: what is special about each, and about the parent that they share."""

    rows: tuple[Row, ...]
    parent: Row = field(default_factory=dict)
    is_orphan: bool = False  # without a parent
    is_twin: bool = False  # its parent is named as another group's


def make_group_rows(needs: Needs) -> Rows:
    maker = Maker(needs, random.Random(11), lambda _, __: maker.dice.randrange(_SPREAD), has_nulls=False)
    for asked in needs.facts.groups:
        table = asked.place[0] if asked.place else _child_most(needs)
        groups = list(_groups_by_figure(needs, asked, table) if asked.place else _groups_by_size(needs, asked, table))
        for group in groups:
            if sum(map(len, maker.rows.values())) + len(group.rows) > _MAX_ROWS:
                break
            _add_group(maker, table, group)
    return maker.rows


def _child_most(needs: Needs) -> str:
    return next((table for table in reversed(needs.order) if table in needs.facts.tables), needs.order[-1])


def _add_group(maker: Maker, table: str, group: Group) -> None:
    """All of one parent, and alike in every column that a group may be made by."""
    needs = maker.needs
    shared: Row = {}
    for parent in dict.fromkeys(place[0] for place in needs.links[table].values()):
        special = {name: value for name, value in group.parent.items() if name in needs.schema[parent].columns}
        if group.is_twin:
            special |= _plain_values(needs, parent, _TWIN_NUMBER)
        if group.is_orphan:
            shared |= {column: None for column in needs.links[table] if needs.may_be_orphan(table, column)}
        else:
            shared |= maker.links_to(table, parent, maker.add_family(parent, maker.witness(parent) | special))
        if needs.schema[table].has_long_key:
            break
    shared |= _plain_values(needs, table, len(maker.rows[table]))
    for special in group.rows:
        maker.add(table, shared | maker.witness(table) | special)


def _plain_values(needs: Needs, table: str, number: int) -> Row:
    conditioned, links = needs.conditioned(table), needs.links[table]
    return {
        name: make_plain(column.kind, index, number)
        for index, (name, column) in enumerate(needs.schema[table].columns.items())
        if name not in conditioned and name not in links and not column.unique
    }


def _groups_by_size(needs: Needs, asked: GroupCondition, table: str) -> Iterator[Group]:
    """One row more or less must decide, whichever edge of whichever condition it lies on."""
    if not 0 <= asked.value <= MANY:
        return
    size = int(asked.value)
    wants_many = asked.operator in (">", ">=", "<>")
    passing = {">": size + 1, "<>": size + 1, "<": max(size - 1, 1)}.get(asked.operator, size)
    for count in (size - 1, size, size + 1, size + 2):
        yield Group(rows=({},) * max(count, 0))
    yield Group(rows=({},) * (passing + 1), is_orphan=True)
    for _ in range(2):
        yield Group(rows=({},) * (passing * 2 // 3 + 1), is_twin=True)
    for column in needs.conditioned(table):
        for value in needs.edges(table, column):
            yield Group(rows=(*({},) * (passing - 1 if wants_many else passing), {column: value}))
    for parent in dict.fromkeys(place[0] for place in needs.links[table].values()):
        for column in needs.conditioned(parent):
            for value in needs.edges(parent, column):
                yield Group(rows=({},) * passing, parent={column: value})


def _groups_by_figure(needs: Needs, asked: GroupCondition, table: str) -> Iterator[Group]:
    assert asked.place is not None
    name, asked_value = asked.place[1], asked.value
    figures = ((0,), (-1,), (1,), (0, 0), (-1, -1), (1, 1), (-3, 1), (-1, 3), (-1, 1), (-2, -2, 5), (2, 2, -5))
    for steps in figures:
        yield Group(rows=tuple({name: asked_value + step} for step in steps))
    for column in needs.conditioned(table):
        if column != name:
            for value in needs.edges(table, column):
                for near, far in ((1, -9), (-1, 9)):
                    yield Group(rows=({name: asked_value + near}, {name: asked_value + far, column: value}))
