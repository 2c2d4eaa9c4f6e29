"""Execution match: compare an answer's rows with the rows of the reference query.

Rows match in any order unless the reference sorts; tied rows match in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlglot import exp

from launcher.judges.sql.parse import DIALECT, is_integer_literal
from launcher.judges.sql.query_analysis import SortedQuery, Value

Cells = tuple[object, ...]
_DIGITS = 12  # significant digits; sums depend on the order in the sixteenth


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """All rows that the reference may return, in blocks of tied rows, with its offset and limit."""

    num_columns: int
    blocks: tuple[Counter[Cells], ...]
    offset: int
    limit: int | None

    @property
    def num_rows(self) -> int:
        """Number of rows that the reference returns."""
        total = max(0, sum(block.total() for block in self.blocks) - self.offset)
        return total if self.limit is None else min(total, self.limit)

    def accepts(self, rows: Sequence[tuple[Value, ...]], num_columns: int) -> bool:
        """Return whether an answer's rows match; of tied rows that LIMIT or OFFSET separates, any may be returned."""
        if num_columns != self.num_columns or len(rows) != self.num_rows:
            return False
        cells = [make_cells(row) for row in rows]
        start, end, taken = self.offset, self.offset + self.num_rows, 0
        low = 0
        for block in self.blocks:
            high = low + block.total()
            count = min(high, end) - max(low, start)
            if count > 0:
                if not Counter(cells[taken : taken + count]) <= block:
                    return False
                taken += count
            low = high
        return True


def make_expected(
    rows: Sequence[tuple[Value, ...]],
    *,
    keys: Sequence[int],
    num_columns: int,
    offset: int = 0,
    limit: int | None = None,
) -> Expected:
    """Group the rows of the reference, in the order that it returns them, into blocks with equal sort keys."""
    blocks: list[Counter[Cells]] = []
    last: Cells | None = None
    for row in rows:
        key = make_cells([row[index] for index in keys])
        if not blocks or key != last:
            blocks.append(Counter())
        blocks[-1][make_cells(row[:num_columns])] += 1
        last = key
    return Expected(num_columns=num_columns, blocks=tuple(blocks), offset=offset, limit=limit)


def make_cells(row: Sequence[Value]) -> Cells:
    """Return the values of a row for comparison: floats are rounded; 1, 1.0 and true are equal, 1 and '1' are not."""
    return tuple(_make_cell(value) for value in row)


def _make_cell(value: Value) -> object:
    if isinstance(value, float) and not value.is_integer():
        return float(f"{value:.{_DIGITS}g}")
    return value


def make_sorted_query(statement: exp.Expr) -> SortedQuery | None:
    """Return a query without LIMIT that also returns its sort keys; None if its ties cannot be determined.

    The SQL is empty if the statement neither sorts nor limits.
    """
    if not isinstance(statement, exp.Select | exp.SetOperation):
        return None
    limit, offset = statement.args.get("limit"), statement.args.get("offset")
    if limit is not None and (not isinstance(limit, exp.Limit) or not is_integer_literal(limit.expression)):
        return None
    if offset is not None and not is_integer_literal(offset.expression):
        return None
    if limit is None and offset is None and statement.args.get("order") is None:
        return SortedQuery(sql="", keys=(), num_added=0, offset=0, limit=None)
    unlimited = statement.copy()
    unlimited.set("limit", None)
    unlimited.set("offset", None)
    keys = _add_sort_keys(unlimited)
    if keys is None:
        return None
    return SortedQuery(
        sql=unlimited.sql(dialect=DIALECT),
        keys=tuple(keys),
        num_added=sum(1 for key in keys if key < 0),
        offset=int(offset.expression.this) if offset is not None else 0,
        limit=int(limit.expression.this) if limit is not None else None,
    )


def _add_sort_keys(statement: exp.Select | exp.SetOperation) -> list[int] | None:
    """Return the columns of a query's sort keys, after it is changed to select them all; None if that is impossible."""
    order = statement.args.get("order")
    if order is None:
        return []
    outputs = statement.selects
    if any(ordered.find(exp.Collate) for ordered in order.expressions):
        return None
    starred = any(output.is_star for output in outputs)
    sources = [output.unalias().sql(dialect=DIALECT).lower() for output in outputs]
    names = [output.alias_or_name.lower() for output in outputs]
    keys: list[int] = []
    added: list[exp.Expr] = []
    for ordered in order.expressions:
        expression = ordered.this.unnest()
        text = expression.sql(dialect=DIALECT).lower()
        unqualified = expression.name.lower() if isinstance(expression, exp.Column) and not expression.table else None
        if is_integer_literal(expression):
            if starred:
                return None
            keys.append(int(expression.this) - 1)
        elif not starred and unqualified in names:
            keys.append(names.index(unqualified or ""))
        elif not starred and text in sources:
            keys.append(sources.index(text))
        elif isinstance(statement, exp.Select) and not statement.args.get("distinct"):
            added.append(expression.copy())
            keys.append(-len(added))
        else:
            return None
    num_added = len(added)
    if isinstance(statement, exp.Select):
        for number, expression in enumerate(added):
            statement.select(exp.alias_(expression, f"sort_key_{number}"), copy=False)
    return [key if key >= 0 else -(num_added + key + 1) for key in keys]
