"""How far predictions were off, over a table of the memory grid: the part that numbers are fitted to, and the rest."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from launcher.bench.memory_rows import GridRow, GridTable
from launcher.memory import count_trainable, estimate_memory
from launcher.shapes import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """predicted / measured - 1, of torch's allocations: the context is alike in every row, and would only flatter."""

    case: str
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    part: str  # fitted, or held out
    basis: str  # who predicted: the plan of then, or the estimator of now
    num_cases: int
    median: float  # of the errors without their signs
    within_95: float  # so many per cent of the cases are no further off
    worst_over: Miss
    worst_under: Miss


def is_held_out(row: GridRow) -> bool:
    """A third, by hash of the configuration: no coefficient of launcher/memory is fitted to them.

    A compiled, checkpointed DoRA counts as fitted: a coefficient rests on it alone.
    """
    recipe = row.make_recipe()
    if recipe.adapter == "dora" and recipe.compiled and recipe.checkpointing == "full":
        return False
    key = json.dumps([row.model, row.recipe], sort_keys=True)
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 3 == 0


def measure_miss(row: GridRow, shape: ModelShape) -> Miss:
    """Of the estimator as it is now."""
    return _miss(row, estimate_memory(shape, row.make_recipe()).allocated_bytes)


def _miss(row: GridRow, predicted: int) -> Miss:
    assert row.peak_allocated_bytes
    return Miss(case=row.case or _describe(row), error=predicted / row.peak_allocated_bytes - 1)


def _describe(row: GridRow) -> str:
    recipe = row.make_recipe()
    way = "compiled" if recipe.compiled else "eager"
    kind = recipe.adapter if recipe.quantization == "none" else f"{recipe.adapter}-{recipe.quantization}"
    return f"{row.model}-{kind}-{recipe.micro_batch_size}x{recipe.sequence_length}-{recipe.checkpointing}-{way}"


def make_summaries(table: GridTable) -> tuple[Summary, ...]:
    """None where no memory was measured, as on a CPU."""
    rows = [row for row in table.records if row.peak_allocated_bytes]
    return tuple(
        summary
        for part, chosen in (
            ("fitted", [row for row in rows if not is_held_out(row)]),
            ("held out", [row for row in rows if is_held_out(row)]),
            ("all", rows),
        )
        for summary in _summarise(part, chosen, table)
    )


def _summarise(part: str, rows: Sequence[GridRow], table: GridTable) -> Iterator[Summary]:
    planned = [_miss(row, row.predicted_bytes) for row in rows if row.predicted_bytes is not None]
    if planned:
        yield _make_summary(part, "as planned before it ran", planned)
    if rows:
        now = [measure_miss(row, table.shapes[row.model]) for row in rows]
        yield _make_summary(part, "by the estimator of now", now)


def _make_summary(part: str, basis: str, misses: Sequence[Miss]) -> Summary:
    sizes = sorted(abs(miss.error) for miss in misses)
    return Summary(
        part=part,
        basis=basis,
        num_cases=len(misses),
        median=statistics.median(sizes),
        within_95=sizes[ceil(0.95 * len(sizes)) - 1],
        worst_over=max(misses, key=lambda miss: miss.error),
        worst_under=min(misses, key=lambda miss: miss.error),
    )


def find_miscounted(table: GridTable) -> tuple[str, ...]:
    """Cases that trained another number of weights than was counted."""
    found = []
    for row in table.records:
        recipe = row.make_recipe()
        counted = count_trainable(table.shapes[row.model], recipe.adapter, recipe.rank, recipe.target_modules)
        if row.num_trainable is not None and counted != row.num_trainable:
            found.append(f"{row.case or _describe(row)}: {counted:,} counted, {row.num_trainable:,} trained")
    return tuple(found)
