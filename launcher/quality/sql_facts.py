"""What a statement and its tables are, as values: what rows are generated from and results are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Value = int | float | str | bytes | None
Kind = Literal["int", "real", "text", "date", "datetime", "time", "bool"]
Operator = Literal["=", "<>", "<", "<=", ">", ">=", "between", "in", "like", "null", "other"]
Place = tuple[str, str]  # table and column, in lower case: SQL does not tell cases apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    name: str
    kind: Kind
    nullable: bool
    unique: bool  # alone: a part of a longer key may repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    name: str
    columns: Mapping[str, Column]  # by name in lower case
    parents: Mapping[str, Place]  # FOREIGN KEYs: column in lower case -> where it leads
    has_long_key: bool  # PRIMARY KEY or UNIQUE over several columns


Schema = Mapping[str, Table]  # by name in lower case


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A column compared with literals. `other`: something of the column is, and nobody computes what."""

    place: Place
    operator: Operator
    values: tuple[Value, ...]
    negated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCondition:
    """An aggregate compared with a number; without a place: rows are counted."""

    place: Place | None
    operator: Operator
    value: int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What of a statement rows have to be made for."""

    tables: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    groups: tuple[GroupCondition, ...] = ()
    limits: tuple[int, ...] = ()
    links: tuple[tuple[Place, Place], ...] = ()  # columns of two tables that are compared

    def join(self, other: Facts) -> Facts:
        """Of two statements, nothing twice."""
        return Facts(
            tables=_merge(self.tables, other.tables),
            conditions=_merge(self.conditions, other.conditions),
            groups=_merge(self.groups, other.groups),
            limits=_merge(self.limits, other.limits),
            links=_merge(self.links, other.links),
        )


def _merge(first: tuple[T, ...], second: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((*first, *second)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Keyed:
    """The reference without its LIMIT and with what it sorts by among its columns: shows which rows are tied."""

    sql: str  # empty: the reference neither sorts nor limits
    keys: tuple[int, ...]  # columns that are sorted by; negative: from the right
    num_added: int  # columns at the end that the reference does not have
    offset: int
    limit: int | None
