"""Errors of the memory estimate over a table of the grid: on the fitted cases and on the held-out ones."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from benchmarks.memory_grid.rows import GridRow, GridTable
from launcher.base_models.shapes import ModelShape
from launcher.plan.estimate.memory import estimate_memory
from launcher.plan.estimate.memory.recipe import count_trainable


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateError:
    """estimated / measured - 1 of torch's allocations; the CUDA context, equal in every row, is not included."""

    case: str
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Distribution of the errors in one part of the table."""

    part: str  # fitted, held out, or all
    basis: str  # the plan's estimate at that time, or the current estimator's
    num_cases: int
    median: float  # of the absolute errors
    within_95: float  # 95th percentile of the absolute errors
    worst_over: EstimateError
    worst_under: EstimateError


def is_held_out(row: GridRow) -> bool:
    """Return whether no coefficient of the estimator is fitted to this row: a third, by hash of the configuration.

    Compiled, checkpointed DoRA is always fitted: one coefficient depends on it alone.
    """
    recipe = row.make_recipe()
    if recipe.adapter == "dora" and recipe.compiled and recipe.checkpointing == "full":
        return False
    key = json.dumps([row.model, row.recipe], sort_keys=True)
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 3 == 0


def compute_error(row: GridRow, shape: ModelShape) -> EstimateError:
    """Return the error of the current estimator."""
    return _make_error(row, estimate_memory(shape, row.make_recipe()).allocated_bytes)


def _make_error(row: GridRow, predicted: int) -> EstimateError:
    assert row.peak_allocated_bytes
    return EstimateError(case=row.case or _describe(row), error=predicted / row.peak_allocated_bytes - 1)


def _describe(row: GridRow) -> str:
    recipe = row.make_recipe()
    mode = "compiled" if recipe.compiled else "eager"
    kind = recipe.adapter if recipe.quantization == "none" else f"{recipe.adapter}-{recipe.quantization}"
    return f"{row.model}-{kind}-{recipe.micro_batch_size}x{recipe.sequence_length}-{recipe.checkpointing}-{mode}"


def make_summaries(table: GridTable) -> tuple[Summary, ...]:
    """Summarize all parts; empty if no memory was measured (on a CPU)."""
    rows = [row for row in table.records if row.peak_allocated_bytes]
    return tuple(
        summary
        for part, part_rows in (
            ("fitted", [row for row in rows if not is_held_out(row)]),
            ("held out", [row for row in rows if is_held_out(row)]),
            ("all", rows),
        )
        for summary in _summarize(part, part_rows, table)
    )


def _summarize(part: str, rows: Sequence[GridRow], table: GridTable) -> Iterator[Summary]:
    planned = [_make_error(row, row.predicted_bytes) for row in rows if row.predicted_bytes is not None]
    if planned:
        yield _make_summary(part, "planned", planned)
    if rows:
        current = [compute_error(row, table.shapes[row.model]) for row in rows]
        yield _make_summary(part, "current estimator", current)


def _make_summary(part: str, basis: str, errors: Sequence[EstimateError]) -> Summary:
    sizes = sorted(abs(error.error) for error in errors)
    return Summary(
        part=part,
        basis=basis,
        num_cases=len(errors),
        median=statistics.median(sizes),
        within_95=sizes[ceil(0.95 * len(sizes)) - 1],
        worst_over=max(errors, key=lambda each: each.error),
        worst_under=min(errors, key=lambda each: each.error),
    )


def list_miscounted(table: GridTable) -> tuple[str, ...]:
    """Return the cases whose estimated number of trainable parameters is wrong."""
    miscounted = []
    for row in table.records:
        recipe = row.make_recipe()
        estimated = count_trainable(table.shapes[row.model], recipe.adapter, recipe.rank, recipe.target_modules)
        if row.num_trainable is not None and estimated != row.num_trainable:
            miscounted.append(f"{row.case or _describe(row)}: {estimated:,} estimated, {row.num_trainable:,} trained")
    return tuple(miscounted)
