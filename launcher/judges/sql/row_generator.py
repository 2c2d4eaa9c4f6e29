"""Rows of the test databases.

Each database is generated to expose another kind of mistake. All are deterministic and small.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from launcher.judges.sql.boundary_values import make_plain_value
from launcher.judges.sql.query_analysis import GroupCondition, Value
from launcher.judges.sql.row_builder import MAX_COUNT, NULL_SHARE, Row, RowBuilder, RowRequirements, Rows

_BALANCED = 12  # nine combinations of two columns, three of them repeated


def make_rows(needs: RowRequirements) -> Iterator[Rows]:
    """Yield the rows of each test database; databases that expose mistakes most often come first.

    In order: no rows, boundary values, varied values, many ties, balanced groups, rows for a long LIMIT and for HAVING,
    and a few tiny databases.
    """
    if not needs.schema:
        return
    yield {table: [] for table in needs.order}
    yield make_boundary_rows(needs)
    yield make_mixed_rows(needs, seed=1, size=14, share=0.7, spread=60)
    yield make_mixed_rows(needs, seed=2, size=16, share=0.6, spread=3)
    yield _make_balanced_rows(needs)
    long_limits = [limit for limit in needs.facts.limits if 5 < limit <= MAX_COUNT]
    if long_limits:
        yield make_mixed_rows(needs, seed=3, size=max(long_limits) * 3 // 2 + 4, share=0.85, spread=997)
    if needs.facts.groups:
        yield make_group_rows(needs)
    yield from make_tiny_rows(needs, range(4))


def make_tiny_rows(needs: RowRequirements, seeds: Iterable[int]) -> Iterator[Rows]:
    """Yield databases with so few rows that each row can decide a minimum, a maximum or an average."""
    for seed in seeds:
        yield make_mixed_rows(needs, seed=100 + seed, size=1 + seed % 4, share=0.4, spread=4 + seed)


def _make_specs(builder: RowBuilder, table: str) -> list[Row]:
    """Return values of rows in which one condition is at a boundary and all others hold, or it alone holds."""
    needs = builder.needs
    columns = needs.list_conditioned(table)
    specs = [builder.make_matching_row(table), builder.make_matching_row(table)]
    specs += [
        builder.make_matching_row(table) | {column: value}
        for column in columns
        for value in needs.boundary_values(table, column)
    ]
    if len(columns) > 1:
        specs.append(builder.make_nonmatching_row(table))
        specs += [builder.make_nonmatching_row(table) | {column: needs.inside[table, column][0]} for column in columns]
    specs += [
        builder.make_matching_row(table) | {column: None if needs.schema[table].columns[column].nullable else 9_999_999}
        for column in needs.links[table]
        if needs.can_be_orphan(table, column)
    ]
    return specs


def make_boundary_rows(needs: RowRequirements) -> Rows:
    """Return rows at boundary values.

    Each row has parents and a child of its own that satisfy all conditions, so that only its boundary value decides.
    """
    builder = RowBuilder(needs, random.Random(7), lambda row, column: (row * 37 + column * 11) % 101)
    carried: dict[str, list[Row]] = {}
    for table in needs.order:
        own = [builder.add_with_parents(table, spec) for spec in _make_specs(builder, table)]
        builder.add(table, dict(_without_unique(needs, table, own[0])))
        for parent in dict.fromkeys(column_ref[0] for column_ref in needs.links[table].values()):
            for row in carried[parent]:
                own.append(
                    builder.add_with_parents(
                        table, builder.make_matching_row(table) | builder.link_columns(table, parent, row)
                    )
                )
        carried[table] = own
        builder.add_with_parents(table, builder.make_matching_row(table))  # without children
    return builder.rows


def make_mixed_rows(
    needs: RowRequirements, *, seed: int, size: int, share: float, spread: int, lowest: int = 0
) -> Rows:
    """Return random rows; about `share` of them satisfy all conditions, other columns have `spread` different values.

    With a `lowest` below zero, plain numbers may be negative.
    """
    builder = RowBuilder(needs, random.Random(seed), lambda _, __: builder.rng.randrange(lowest, lowest + spread))
    for table in needs.order:
        is_parent = any(column_ref[0] == table for name in needs.order for column_ref in needs.links[name].values())
        columns, links = needs.list_conditioned(table), needs.links[table]
        for _ in range(max(min(5, size), size // 2) if is_parent else size):
            row = builder.make_matching_row(table) if columns and builder.rng.random() < share else {}
            for column in columns:
                if column not in row and not needs.schema[table].columns[column].unique:
                    row[column] = builder.rng.choice(needs.boundary_values(table, column))
            for column in links:
                if needs.schema[table].columns[column].nullable and builder.rng.random() < NULL_SHARE:
                    row[column] = None
            builder.add(table, row)
        if spread <= 3:
            builder.add(table, dict(_without_unique(needs, table, builder.rows[table][-1])))
    return builder.rows


def make_look_alike_rows(needs: RowRequirements) -> Rows:
    """Return random rows of few values, whose texts also differ by case only, and whose numbers have many decimals.

    A query that folds case in GROUP BY, DISTINCT or ORDER BY, or that rounds in another way, returns something else.
    """
    rows = make_mixed_rows(needs, seed=14, size=20, share=0.8, spread=4)
    rng = random.Random(14)
    linked = {column_ref for links in needs.links.values() for column_ref in links.values()}
    for table, columns in ((name, needs.schema[name].columns) for name in needs.order):
        kept = {*needs.list_conditioned(table), *needs.links[table]}
        changed = [name for name in columns if name not in kept and (table, name) not in linked]
        for row in rows[table]:
            for name in changed:
                value = row.get(name)
                if columns[name].kind == "text" and isinstance(value, str) and rng.random() < 0.5:
                    row[name] = value.swapcase()
                elif columns[name].kind == "real" and isinstance(value, int | float):
                    row[name] = value + rng.choice((0.0, 0.123456, 0.518273, 0.987654))
    return rows


def _without_unique(needs: RowRequirements, table: str, row: Row) -> Iterator[tuple[str, Value]]:
    """Yield the values of a row without its unique columns, to duplicate it."""
    columns = needs.schema[table].columns
    yield from ((name, value) for name, value in row.items() if not columns[name].unique)


def _make_balanced_rows(needs: RowRequirements) -> Rows:
    """Return rows with three alternating values: some equal the average, groups are equally large, some rows repeat."""
    builder = RowBuilder(
        needs, random.Random(5), lambda row, column: (row + column + row // 3 * (column % 2)) % 3, False
    )
    for table in needs.order:
        for number in range(_BALANCED):
            links = {
                column: builder.rows[name][number % 3][at]
                for column, (name, at) in needs.links[table].items()
                if builder.rows[name]
            }
            builder.add(table, builder.make_matching_row(table) | links)
    return builder.rows


_MAX_ROWS = 4_000
_SPREAD = 50
_TWIN_NUMBER = _SPREAD + 1  # number of values that no other group has


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A group of a GROUP BY to generate: values that its rows and their common parent row must have."""

    rows: tuple[Row, ...]
    parent: Row = field(default_factory=dict)
    is_orphan: bool = False  # without a parent
    is_twin: bool = False  # its parent has the same name as that of another group


def make_group_rows(needs: RowRequirements) -> Rows:
    """Return rows for HAVING: groups whose size or average is just below, at and just above the threshold."""
    builder = RowBuilder(needs, random.Random(11), lambda _, __: builder.rng.randrange(_SPREAD), has_nulls=False)
    for condition in needs.facts.groups:
        table = condition.column[0] if condition.column else _find_leaf_table(needs)
        groups = list(
            _make_value_groups(needs, condition, table)
            if condition.column
            else _make_size_groups(needs, condition, table)
        )
        for group in groups:
            if sum(map(len, builder.rows.values())) + len(group.rows) > _MAX_ROWS:
                break
            _add_group(builder, table, group)
    return builder.rows


def _find_leaf_table(needs: RowRequirements) -> str:
    return next((table for table in reversed(needs.order) if table in needs.facts.tables), needs.order[-1])


def _add_group(builder: RowBuilder, table: str, group: Group) -> None:
    """Add rows with a common parent and equal values in every column that may be grouped by."""
    needs = builder.needs
    shared: Row = {}
    for parent in dict.fromkeys(column_ref[0] for column_ref in needs.links[table].values()):
        special = {name: value for name, value in group.parent.items() if name in needs.schema[parent].columns}
        if group.is_twin:
            special |= _plain_values(needs, parent, _TWIN_NUMBER)
        if group.is_orphan:
            shared |= {column: None for column in needs.links[table] if needs.can_be_orphan(table, column)}
        else:
            shared |= builder.link_columns(
                table, parent, builder.add_with_parents(parent, builder.make_matching_row(parent) | special)
            )
        if needs.schema[table].has_composite_key:
            break
    shared |= _plain_values(needs, table, len(builder.rows[table]))
    for special in group.rows:
        builder.add(table, shared | builder.make_matching_row(table) | special)


def _plain_values(needs: RowRequirements, table: str, number: int) -> Row:
    list_conditioned, links = needs.list_conditioned(table), needs.links[table]
    return {
        name: make_plain_value(column.kind, index, number)
        for index, (name, column) in enumerate(needs.schema[table].columns.items())
        if name not in list_conditioned and name not in links and not column.unique
    }


def _make_size_groups(needs: RowRequirements, condition: GroupCondition, table: str) -> Iterator[Group]:
    """Yield groups near the threshold of a condition on their size, where one row more or less changes the result."""
    if not 0 <= condition.value <= MAX_COUNT:
        return
    size = int(condition.value)
    wants_many = condition.operator in (">", ">=", "<>")
    passing = {">": size + 1, "<>": size + 1, "<": max(size - 1, 1)}.get(condition.operator, size)
    for count in (size - 1, size, size + 1, size + 2):
        yield Group(rows=({},) * max(count, 0))
    yield Group(rows=({},) * (passing + 1), is_orphan=True)
    for _ in range(2):
        yield Group(rows=({},) * (passing * 2 // 3 + 1), is_twin=True)
    for column in needs.list_conditioned(table):
        for value in needs.boundary_values(table, column):
            yield Group(rows=(*({},) * (passing - 1 if wants_many else passing), {column: value}))
    for parent in dict.fromkeys(column_ref[0] for column_ref in needs.links[table].values()):
        for column in needs.list_conditioned(parent):
            for value in needs.boundary_values(parent, column):
                yield Group(rows=({},) * passing, parent={column: value})


def _make_value_groups(needs: RowRequirements, condition: GroupCondition, table: str) -> Iterator[Group]:
    assert condition.column is not None
    name, threshold = condition.column[1], condition.value
    figures = ((0,), (-1,), (1,), (0, 0), (-1, -1), (1, 1), (-3, 1), (-1, 3), (-1, 1), (-2, -2, 5), (2, 2, -5))
    for steps in figures:
        yield Group(rows=tuple({name: threshold + step} for step in steps))
    for column in needs.list_conditioned(table):
        if column != name:
            for value in needs.boundary_values(table, column):
                for near, far in ((1, -9), (-1, 9)):
                    yield Group(rows=({name: threshold + near}, {name: threshold + far, column: value}))
