"""Typed description of tables and of one SQL statement: conditions, aggregates, limits and joins.

From it, rows are generated on which similar statements return different results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from sqlglot import exp

from launcher.judges.sql.parse import is_integer_literal

T = TypeVar("T")
Value = int | float | str | bytes | None
ColumnKind = Literal["int", "real", "text", "date", "datetime", "time", "bool"]
Operator = Literal["=", "<>", "<", "<=", ">", ">=", "between", "in", "like", "null", "length", "other"]
ColumnRef = tuple[str, str]  # table and column in lower case


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    kind: ColumnKind
    nullable: bool
    unique: bool  # by itself; part of a composite key may repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of a row's schema."""

    name: str
    columns: Mapping[str, Column]  # by name in lower case
    parents: Mapping[str, ColumnRef]  # FOREIGN KEYs by column in lower case
    has_composite_key: bool  # PRIMARY KEY or UNIQUE over several columns

    def with_dates(self, names: Collection[str]) -> Table:
        """Return the table with the text columns of the given names as columns of dates."""
        columns = {
            key: replace(column, kind="date") if key in names and column.kind == "text" else column
            for key, column in self.columns.items()
        }
        return replace(self, columns=columns)


Schema = Mapping[str, Table]  # by name in lower case


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A column compared with literals; operator `length` compares its length, `other` another expression of it."""

    column: ColumnRef
    operator: Operator
    values: tuple[Value, ...]
    negated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCondition:
    """An aggregate of a column compared with a number (HAVING); without a column: COUNT."""

    column: ColumnRef | None
    operator: Operator
    value: int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryFacts:
    """The parts of a statement that generated rows have to cover."""

    tables: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    groups: tuple[GroupCondition, ...] = ()
    limits: tuple[int, ...] = ()
    links: tuple[tuple[ColumnRef, ColumnRef], ...] = ()  # pairs of compared columns of two tables

    def join(self, other: QueryFacts) -> QueryFacts:
        """Return the union of the facts of two statements."""
        return QueryFacts(
            tables=_merge(self.tables, other.tables),
            conditions=_merge(self.conditions, other.conditions),
            groups=_merge(self.groups, other.groups),
            limits=_merge(self.limits, other.limits),
            links=_merge(self.links, other.links),
        )


def _merge(first: tuple[T, ...], second: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys((*first, *second)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedQuery:
    """A query without LIMIT and OFFSET that also returns its sort keys, so that tied rows can be identified."""

    sql: str  # empty: the query neither sorts nor limits
    keys: tuple[int, ...]  # indices of the sort columns; negative: from the right
    num_added: int  # sort columns appended at the end
    offset: int
    limit: int | None


_MAX_DIGITS = 18  # integers with more digits are floats in SQLite
_OPERATORS: dict[str, Operator] = {
    "EQ": "=", "Is": "=", "NEQ": "<>", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">=", "Like": "like", "ILike": "like",
}  # fmt: skip
_FLIPPED: dict[Operator, Operator] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def analyze_query(statement: exp.Expr, schema: Schema) -> QueryFacts:
    """Return the tables, conditions, aggregates, limits and joins of a statement; unknown names are skipped.

    For an unforeseen kind of statement, the result is empty: test rows have no boundary values then.
    """
    try:
        return _analyze(statement, schema)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return QueryFacts()


def _analyze(statement: exp.Expr, schema: Schema) -> QueryFacts:
    columns = _Columns(statement, schema)
    conditions: list[Condition] = []
    groups: list[GroupCondition] = []
    links: list[tuple[ColumnRef, ColumnRef]] = []
    for node in statement.find_all(exp.Predicate):
        for condition in _conditions_of(node, columns):
            if isinstance(condition, Condition):
                conditions.append(condition)
            else:
                groups.append(condition)
        links += _links_of(node, columns)
    limits = [
        int(limit.expression.this) for limit in statement.find_all(exp.Limit) if is_integer_literal(limit.expression)
    ]
    return QueryFacts(
        tables=tuple(columns.tables),
        conditions=tuple(conditions),
        groups=tuple(groups),
        limits=tuple(limits),
        links=tuple(links),
    )


class _Columns:
    """Resolves column names; an unqualified name may be a column of several tables."""

    def __init__(self, statement: exp.Expr, schema: Schema) -> None:
        self._schema = schema
        self._aliases: dict[str, list[str]] = {}
        for table in statement.find_all(exp.Table):
            name = table.name.lower()
            if name in schema:
                self._aliases.setdefault(table.alias_or_name.lower(), []).append(name)
        self.tables = list(dict.fromkeys(name for names in self._aliases.values() for name in names))

    def find(self, column: exp.Column) -> list[ColumnRef]:
        tables = self._aliases.get(column.table.lower(), []) if column.table else self.tables
        name = column.name.lower()
        return [(table, name) for table in dict.fromkeys(tables) if name in self._schema[table].columns]


def _conditions_of(node: exp.Expr, columns: _Columns) -> Iterator[Condition | GroupCondition]:
    outer = node.find_ancestor(exp.Not, exp.Query)
    negated = isinstance(outer, exp.Not) and outer.this.unnest() is node
    compared = _split_comparison(node)
    if compared is None:
        return
    side, operator, right = compared
    if any(part.find(exp.Column, exp.Query, exp.AggFunc) for part in right) or side.find(exp.Query):
        return
    if len(right) == 1 and isinstance(right[0], exp.Null):
        yield from _compare(side, "null", (), negated, columns)
    elif values := tuple(value for part in right for value in _values_of(part)):
        yield from _compare(side, operator, values, negated, columns)


def _split_comparison(node: exp.Expr) -> tuple[exp.Expr, Operator, list[exp.Expr]] | None:
    """Return the compared expression, the operator and the values; None for other predicates."""
    if isinstance(node, exp.Between):
        return node.this, "between", [node.args["low"], node.args["high"]]
    if isinstance(node, exp.In):
        return None if node.args.get("query") else (node.this, "in", node.expressions)
    operator = _OPERATORS.get(type(node).__name__)
    if operator is None:
        return None
    if node.this.find(exp.Column, exp.AggFunc):
        return node.this, operator, [node.expression]
    return node.expression, _FLIPPED.get(operator, operator), [node.this]


def _compare(
    side: exp.Expr, operator: Operator, values: tuple[Value, ...], negated: bool, columns: _Columns
) -> Iterator[Condition | GroupCondition]:
    side = side.unnest()
    column = side.find(exp.Column)
    aggregate = side.find(exp.AggFunc)
    if aggregate is not None:
        aggregated = columns.find(column) if column is not None and not isinstance(aggregate, exp.Count) else []
        for number in values:
            if isinstance(number, int | float):
                yield GroupCondition(column=aggregated[0] if aggregated else None, operator=operator, value=number)
        return
    if column is None:
        return
    for column_ref in columns.find(column):
        known = operator if _is_transparent(side, column) else "length" if isinstance(side, exp.Length) else "other"
        yield Condition(column=column_ref, operator=known, values=values, negated=negated)


def find_row_bounds(statement: exp.Expr) -> list[exp.Literal]:
    """Return the integer literals that limit numbers of rows: in LIMITs, and in comparisons with counts and ranks."""
    limits = [limit.expression for limit in statement.find_all(exp.Limit)]
    named = {alias.alias for alias in statement.find_all(exp.Alias) if alias.this.find(exp.Count, exp.Window)}
    counts = [
        side
        for node in statement.find_all(exp.Predicate)
        if isinstance(node, exp.Binary)
        and (node.find(exp.Count) or any(column.name in named for column in node.find_all(exp.Column)))
        for side in (node.this.unnest(), node.expression.unnest())
    ]
    return [bound for bound in (*limits, *counts) if isinstance(bound, exp.Literal) and is_integer_literal(bound)]


def _is_transparent(side: exp.Expr, column: exp.Column) -> bool:
    """Return whether an expression such as LOWER(x) or CAST(x AS ...) has nearly the same boundaries as x."""
    while isinstance(side, exp.Lower | exp.Upper | exp.Trim | exp.Cast | exp.Coalesce | exp.Round | exp.Paren):
        side = side.this
    return side is column


def _values_of(node: exp.Expr) -> Iterator[Value]:
    for literal in node.find_all(exp.Literal, exp.Boolean):
        if isinstance(literal, exp.Boolean):
            yield int(literal.this)
        elif literal.is_string:
            yield str(literal.this)
        else:
            sign = -1 if isinstance(literal.parent, exp.Neg) else 1
            text = str(literal.this)
            try:
                yield sign * (int(text) if text.isdigit() and len(text) < _MAX_DIGITS else float(text))
            except ValueError:  # e.g. 0x1F
                continue


def _links_of(node: exp.Expr, columns: _Columns) -> Iterator[tuple[ColumnRef, ColumnRef]]:
    """Yield joined columns: a.x = b.y, and x IN (SELECT y ...)."""
    if isinstance(node, exp.EQ):
        left, right = node.this.unnest(), node.expression.unnest()
    elif isinstance(node, exp.In) and node.args.get("query"):
        query = node.args["query"].unnest()
        outputs = query.selects if isinstance(query, exp.Query) else []
        if len(outputs) != 1:
            return
        left, right = node.this.unnest(), outputs[0].unalias()
    else:
        return
    if isinstance(left, exp.Column) and isinstance(right, exp.Column):
        for one in columns.find(left):
            for other in columns.find(right):
                if one[0] != other[0]:
                    yield one, other
