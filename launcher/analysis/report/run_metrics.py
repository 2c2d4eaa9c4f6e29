"""Summary values of a run, computed from its metrics.jsonl; None where nothing was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from launcher.core import metrics
from launcher.core.metrics import METRICS_BY_NAME, StepMetrics, find_values, is_task_metric
from launcher.core.units import format_value

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_JOULES_PER_WH = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurve:
    """Finite values of a loss during training, and its best step."""

    first: float
    last: float
    best: float
    best_step: int
    values: tuple[float, ...]


def compute_median(rows: Iterable[StepMetrics], name: str) -> float | None:
    """Return the median of a metric's finite values."""
    return _reduce(rows, name, statistics.median)


def compute_max(rows: Iterable[StepMetrics], name: str) -> float | None:
    """Return the maximum of a metric's finite values."""
    return _reduce(rows, name, max)


def get_last(rows: Iterable[StepMetrics], name: str) -> float | None:
    """Return the last finite value of a metric."""
    return _reduce(rows, name, lambda values: values[-1])


def _reduce(rows: Iterable[StepMetrics], name: str, reduction: Callable[[list[float]], float]) -> float | None:
    values = find_values(rows, name)
    return reduction(values) if values else None


def collect_loss_curve(rows: Sequence[StepMetrics], name: str) -> LossCurve | None:
    """Return the finite values of a loss with its first, last and lowest value."""
    points = [(value, row.step) for row in rows if (value := row.get(name)) is not None and math.isfinite(value)]
    if not points:
        return None
    best, best_step = min(points)
    values = tuple(value for value, _ in points)
    return LossCurve(first=values[0], last=values[-1], best=best, best_step=best_step, values=values)


def compute_energy_wh(rows: Iterable[StepMetrics]) -> float | None:
    """Return the energy of all steps that measured it, in watt-hours."""
    names = (metrics.JOULES_PER_TOKEN, metrics.TOKENS_PER_SECOND, metrics.STEP_SECONDS)
    factors = [[row.values.get(name, math.nan) for name in names] for row in rows]
    joules = [math.prod(values) for values in factors if all(map(math.isfinite, values))]
    return sum(joules) / _JOULES_PER_WH if joules else None


def collect_last_task_metrics(rows: Iterable[StepMetrics]) -> dict[str, tuple[float, int]]:
    """Return the last value of each task metric, and its step."""
    return {
        name: (value, row.step)
        for row in rows
        for name, value in row.values.items()
        if is_task_metric(name) and math.isfinite(value)
    }


def draw_sparkline(values: Sequence[float]) -> str:
    """Draw values as block characters, averaged over equal parts if there are many."""
    width = min(len(values), _SPARK_WIDTH)
    bounds = [round(part * len(values) / width) for part in range(width + 1)] if width else []
    means = [statistics.fmean(values[start:end]) for start, end in pairwise(bounds)]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def format_metric(name: str, value: float) -> str:
    """Format a value in the metric's unit; unlike in tables of several runs, rates are not abbreviated."""
    unit = METRICS_BY_NAME[name].unit
    if unit in ("", "share", "s", "GiB", "J"):
        return format_value(value, unit)
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
