"""Rows for a question's databases. Each database is made to show another kind of mistake; all of them are
deterministic, and each is small, because a mistake shows in a few rows that were chosen for it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from launcher.quality.sql_facts import Value
from launcher.quality.sql_groups import make_group_rows
from launcher.quality.sql_maker import MANY, NULL_SHARE, Maker
from launcher.quality.sql_needs import Needs, Row, Rows

_BALANCED = 12  # nine combinations of two columns, and three of them again


def make_rows(needs: Needs) -> Iterator[Rows]:
    """Databases in the order in which they find mistakes: empty, edges, varied, tied, on the average; then those for a
    long LIMIT and for HAVING, and a few tiny ones."""
    if not needs.schema:
        return
    yield {table: [] for table in needs.order}
    yield make_edge_rows(needs)
    yield make_mixed_rows(needs, seed=1, size=14, share=0.7, spread=60)
    yield make_mixed_rows(needs, seed=2, size=16, share=0.6, spread=3)
    yield _make_balanced_rows(needs)
    long_limits = [limit for limit in needs.facts.limits if 5 < limit <= MANY]
    if long_limits:
        yield make_mixed_rows(needs, seed=3, size=max(long_limits) * 3 // 2 + 4, share=0.85, spread=997)
    if needs.facts.groups:
        yield make_group_rows(needs)
    yield from make_tiny_rows(needs, range(4))


def make_tiny_rows(needs: Needs, seeds: Iterable[int]) -> Iterator[Rows]:
    """Few rows, many times: in a database of three, each decides a minimum, a maximum and an average."""
    for seed in seeds:
        yield make_mixed_rows(needs, seed=100 + seed, size=1 + seed % 4, share=0.4, spread=4 + seed)


def _own_specs(maker: Maker, table: str) -> list[Row]:
    """Each condition at each of its edges while all others are met; each met while all others are not."""
    needs = maker.needs
    columns = needs.conditioned(table)
    specs = [maker.witness(table), maker.witness(table)]
    specs += [maker.witness(table) | {column: value} for column in columns for value in needs.edges(table, column)]
    if len(columns) > 1:
        specs.append(maker.stranger(table))
        specs += [maker.stranger(table) | {column: needs.inside[table, column][0]} for column in columns]
    specs += [
        maker.witness(table) | {column: None if needs.schema[table].columns[column].nullable else 9_999_999}
        for column in needs.links[table]
        if needs.may_be_orphan(table, column)
    ]
    return specs


def make_edge_rows(needs: Needs) -> Rows:
    """Every row at an edge has parents of its own and a child of its own that meet their conditions: whether it is
    found depends on this one edge."""
    maker = Maker(needs, random.Random(7), lambda row, column: (row * 37 + column * 11) % 101)
    carried: dict[str, list[Row]] = {}
    for table in needs.order:
        own = [maker.add_family(table, spec) for spec in _own_specs(maker, table)]
        maker.add(table, dict(_without_unique(needs, table, own[0])))
        for parent in dict.fromkeys(place[0] for place in needs.links[table].values()):
            for row in carried[parent]:
                own.append(maker.add_family(table, maker.witness(table) | maker.links_to(table, parent, row)))
        carried[table] = own
        maker.add_family(table, maker.witness(table))  # without children
    return maker.rows


def make_mixed_rows(needs: Needs, *, seed: int, size: int, share: float, spread: int) -> Rows:
    """At random; conditions are met in about `share` of the rows. `spread`: how many values a plain column has."""
    maker = Maker(needs, random.Random(seed), lambda _, __: maker.dice.randrange(spread))
    for table in needs.order:
        is_parent = any(place[0] == table for name in needs.order for place in needs.links[name].values())
        columns, links = needs.conditioned(table), needs.links[table]
        for _ in range(max(min(5, size), size // 2) if is_parent else size):
            row = maker.witness(table) if columns and maker.dice.random() < share else {}
            for column in columns:
                if column not in row and not needs.schema[table].columns[column].unique:
                    row[column] = maker.dice.choice(needs.edges(table, column))
            for column in links:
                if needs.schema[table].columns[column].nullable and maker.dice.random() < NULL_SHARE:
                    row[column] = None
            maker.add(table, row)
        if spread <= 3:
            maker.add(table, dict(_without_unique(needs, table, maker.rows[table][-1])))
    return maker.rows


def _without_unique(needs: Needs, table: str, row: Row) -> Iterator[tuple[str, Value]]:
    """The same row again, as far as a key allows."""
    columns = needs.schema[table].columns
    yield from ((name, value) for name, value in row.items() if not columns[name].unique)


def _make_balanced_rows(needs: Needs) -> Rows:
    """Three values in turn, so that some rows lie exactly on an average, groups are of one size, and some are twins."""
    maker = Maker(needs, random.Random(5), lambda row, column: (row + column + row // 3 * (column % 2)) % 3, False)
    for table in needs.order:
        for number in range(_BALANCED):
            links = {
                column: maker.rows[name][number % 3][at]
                for column, (name, at) in needs.links[table].items()
                if maker.rows[name]
            }
            maker.add(table, maker.witness(table) | links)
    return maker.rows
