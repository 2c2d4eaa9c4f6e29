"""Are two results the same? Rows in any order, except where the reference sorts; there, tied rows in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.quality.sql_facts import Value

Cells = tuple[object, ...]
_DIGITS = 12  # sums of the same numbers in another order differ in the sixteenth


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """All rows that the reference could give, in runs of tied ones, and which of them it gives."""

    num_columns: int
    blocks: tuple[Counter[Cells], ...]
    offset: int
    limit: int | None

    @property
    def num_rows(self) -> int:
        total = max(0, sum(block.total() for block in self.blocks) - self.offset)
        return total if self.limit is None else min(total, self.limit)

    def accepts(self, rows: Sequence[tuple[Value, ...]], num_columns: int) -> bool:
        """A block that is cut by the LIMIT may give any of its rows."""
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
    """Rows in the reference's order, with the columns that it sorts by among them or behind them."""
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
    """1, 1.0 and true are one value; numbers and texts never are."""
    return tuple(_make_cell(value) for value in row)


def _make_cell(value: Value) -> object:
    if isinstance(value, float) and not value.is_integer():
        return float(f"{value:.{_DIGITS}g}")
    return value
