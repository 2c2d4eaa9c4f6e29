"""Figures of a run, from its lines of metrics. None wherever nothing was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from launcher import metrics
from launcher.metrics import METRICS_BY_NAME, StepMetrics, find_values, is_task_metric
from launcher.record import RunRecord
from launcher.units import format_duration, format_percent

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_JOULES_PER_WH = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """A loss on its way; lower is better."""

    first: float
    last: float
    best: float
    best_step: int
    values: tuple[float, ...]


def find_median(rows: Iterable[StepMetrics], name: str) -> float | None:
    return _summarise(rows, name, statistics.median)


def find_highest(rows: Iterable[StepMetrics], name: str) -> float | None:
    return _summarise(rows, name, max)


def find_last(rows: Iterable[StepMetrics], name: str) -> float | None:
    return _summarise(rows, name, lambda values: values[-1])


def _summarise(rows: Iterable[StepMetrics], name: str, how: Callable[[list[float]], float]) -> float | None:
    values = find_values(rows, name)
    return how(values) if values else None


def find_course(rows: Sequence[StepMetrics], name: str) -> Course | None:
    told = [(value, row.step) for row in rows if (value := row.get(name)) is not None and math.isfinite(value)]
    if not told:
        return None
    best, best_step = min(told)
    values = tuple(value for value, _ in told)
    return Course(first=values[0], last=values[-1], best=best, best_step=best_step, values=values)


def find_data_wait(rows: Sequence[StepMetrics]) -> tuple[str, float] | None:
    """Of the device where it is known, else of the host."""
    share = find_median(rows, metrics.DATA_WAIT_SHARE)
    if share is not None:
        return METRICS_BY_NAME[metrics.DATA_WAIT_SHARE].title, share
    waited, trained = (sum(find_values(rows, name)) for name in (metrics.DATA_WAIT_SECONDS, metrics.STEP_SECONDS))
    if not trained or not find_values(rows, metrics.DATA_WAIT_SECONDS):
        return None
    return METRICS_BY_NAME[metrics.DATA_WAIT_SECONDS].title, waited / trained


def find_energy(rows: Iterable[StepMetrics]) -> float | None:
    """Watt-hours of the steps."""
    names = (metrics.JOULES_PER_TOKEN, metrics.TOKENS_PER_SECOND, metrics.STEP_SECONDS)
    told = [[row.values.get(name, math.nan) for name in names] for row in rows]
    joules = [math.prod(values) for values in told if all(map(math.isfinite, values))]
    return sum(joules) / _JOULES_PER_WH if joules else None


def find_total_seconds(record: RunRecord) -> float | None:
    """All starts together, without the pauses between them; one that was killed without a word is not counted."""
    ended = None if record.outcome is None else record.outcome.goodput.get(metrics.TOTAL_SECONDS)
    told = find_last(record.rows, metrics.TOTAL_SECONDS) if ended is None else ended
    if told is not None:
        return told
    attempts = () if record.outcome is None else record.outcome.attempts
    spans = [_span(attempt.started_at, attempt.ended_at) for attempt in attempts if attempt.ended_at is not None]
    return sum(spans) if spans else None


def _span(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def find_goodput(record: RunRecord) -> dict[str, float]:
    """By the metrics' names: as the run's end told it, else as its last lines did."""
    told = {} if record.outcome is None else dict(record.outcome.goodput)
    names = [name for name in METRICS_BY_NAME if name.startswith("goodput/")]
    found = {name: told.get(name, find_last(record.rows, name)) for name in names}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def find_last_task_metrics(rows: Iterable[StepMetrics]) -> dict[str, tuple[float, int]]:
    """By the metric's name: its last value, and its step."""
    return {
        name: (value, row.step)
        for row in rows
        for name, value in row.values.items()
        if is_task_metric(name) and math.isfinite(value)
    }


def draw_sparkline(values: Sequence[float]) -> str:
    """Means of equal parts, low to high."""
    width = min(len(values), _SPARK_WIDTH)
    borders = [round(part * len(values) / width) for part in range(width + 1)] if width else []
    means = [statistics.fmean(values[start:end]) for start, end in pairwise(borders)]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def format_metric(name: str, value: float) -> str:
    """In the metric's own unit."""
    metric = METRICS_BY_NAME.get(name)
    match metric.unit if metric is not None else "":
        case "share":
            return format_percent(value)
        case "s":
            return format_seconds(value)
        case "GiB":
            return f"{value:.2f} GiB"
        case "J":
            return f"{value:.3g} J"
        case "":
            return f"{value:.4g}"
        case unit:
            return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Of a step as of a run."""
    return f"{seconds:.3g} s" if seconds < 10 else format_duration(seconds)
