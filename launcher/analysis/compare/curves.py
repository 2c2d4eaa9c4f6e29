"""Curves of a run, downsampled so that many long runs fit on one page, and its time breakdown by activity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.model import Axis, Series, Share
from launcher.analysis.compare.summary_metrics import compute_waited_seconds, compute_wall_clock
from launcher.core import metrics
from launcher.core.metrics import EVAL_SECONDS, STEP_SECONDS, TASK_SECONDS, TOKENS_SEEN, TOTAL_SECONDS

_PAGE_POINTS = 150_000  # per page, about 4 MB
_MIN_POINTS, _MAX_POINTS = 300, 1_500  # per series; a chart is about 1,000 pixels wide
PARTS: tuple[str, ...] = (
    "training",
    "data wait",
    "evaluation",
    "checkpoints",
    "compiling",
    "start",
    "restarts",
    "skipped steps",
    "other",
)
_MIN_OTHER = 0.001  # of the total; less is rounding
_RECORDED: dict[str, str] = {
    "data wait": metrics.DATA_SECONDS,
    "evaluation": metrics.EVALUATION_SECONDS,
    "checkpoints": metrics.CHECKPOINT_SECONDS,
    "compiling": metrics.COMPILE_SECONDS,
    "start": metrics.START_SECONDS,
    "restarts": metrics.RESTART_SECONDS,
    "skipped steps": metrics.SKIPPED_SECONDS,
}


def compute_max_points(num_series: int) -> int:
    """Return the maximal number of points per series."""
    return max(_MIN_POINTS, min(_MAX_POINTS, _PAGE_POINTS // max(1, num_series)))


def make_series(facts: RunFacts, metric: str, max_points: int) -> Series | None:
    """Return the downsampled curve of a metric; None if the run has no finite value of it."""
    column = facts.column(metric)
    steps, values = column.steps, column.values
    if not column.has_values:
        return None
    if len(values) <= max_points:
        return Series(metric=metric, step=tuple(steps), mean=tuple(map(_round_finite, values)), low=None, high=None)
    bounds = _cut(len(values), max_points)
    finite = [[value for value in values[begin:end] if math.isfinite(value)] for begin, end in bounds]
    return Series(
        metric=metric,
        step=tuple(steps[(begin + end) // 2] for begin, end in bounds),
        mean=tuple(_round_finite(math.fsum(bucket) / len(bucket)) if bucket else None for bucket in finite),
        low=tuple(_round_finite(min(bucket)) if bucket else None for bucket in finite),
        high=tuple(_round_finite(max(bucket)) if bucket else None for bucket in finite),
    )


def make_axis(facts: RunFacts, max_points: int) -> Axis:
    """Return tokens and seconds at some steps; unrecorded seconds are summed from steps and evaluations."""
    steps = sorted({step for column in facts.columns.values() for step in column.steps})
    seconds = _compute_seconds(facts, steps)
    tokens = _carry(facts, TOKENS_SEEN, steps)
    kept = _pick(range(len(steps)), max_points)
    return Axis(
        step=tuple(steps[index] for index in kept),
        tokens=None if tokens is None else tuple(_round(tokens[index]) for index in kept),
        seconds=None if seconds is None else tuple(_round(seconds[index]) for index in kept),
    )


def _compute_seconds(facts: RunFacts, steps: Sequence[int]) -> list[float] | None:
    if facts.column(TOTAL_SECONDS).has_values:
        return _carry(facts, TOTAL_SECONDS, steps)
    step_seconds, eval_seconds, task_seconds = (
        {step: value for step, value in zip(column.steps, column.values, strict=True) if math.isfinite(value)}
        for column in map(facts.column, (STEP_SECONDS, EVAL_SECONDS, TASK_SECONDS))
    )
    if not step_seconds and not eval_seconds:
        return None
    total, seconds = 0.0, []
    for step in steps:
        total += step_seconds.get(step, 0.0)
        seconds.append(total)  # a step ended before its evaluation began
        total += eval_seconds.get(step, 0.0) + task_seconds.get(step, 0.0)
    return seconds


def _carry(facts: RunFacts, metric: str, steps: Sequence[int]) -> list[float] | None:
    """Return the running maximum of a metric at each step."""
    column = facts.column(metric)
    if not column.has_values:
        return None
    by_step = dict(zip(column.steps, column.values, strict=True))
    highest, carried = 0.0, []
    for step in steps:
        value = by_step.get(step)
        if value is not None and math.isfinite(value):
            highest = max(highest, value)
        carried.append(highest)
    return carried


def _cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Return bounds of equal buckets; the first and the last point are buckets by themselves."""
    inner = parts - 2
    bounds = [1 + round(index * (length - 2) / inner) for index in range(inner + 1)]
    middle = [(begin, end) for begin, end in pairwise(bounds) if begin < end]
    return [(0, 1), *middle, (length - 1, length)]


def _pick(indices: Sequence[int], most: int) -> list[int]:
    if len(indices) <= most:
        return list(indices)
    return [indices[round(number * (len(indices) - 1) / (most - 1))] for number in range(most)]


def _round_finite(value: float) -> float | None:
    return _round(value) if math.isfinite(value) else None


def _round(value: float) -> float:
    """Round to six digits, which halves the size of the page."""
    return float(f"{value:.6g}")


def make_shares(run: RunFacts) -> tuple[tuple[Share, ...], bool]:
    """Return the parts with nonzero time in a fixed order, and whether the run recorded them."""
    recorded = {part: value for part, name in _RECORDED.items() if (value := run.last(name)) is not None}
    seconds = dict(recorded) if recorded else _sum_parts(run)
    total = compute_wall_clock(run)
    if recorded:
        goodput = run.last(metrics.GOODPUT)
        inside = math.fsum(recorded.get(part, 0.0) for part in ("data wait", "skipped steps"))  # part of the step time
        trained = total * goodput if total is not None and goodput is not None else _trained_seconds(run) - inside
        seconds["training"] = max(0.0, trained)
    if total is not None and seconds:
        rest = total - math.fsum(seconds.values())
        if rest > _MIN_OTHER * total:
            seconds["other"] = rest
    shares = tuple(
        Share(part=part, seconds=_round(seconds[part]))
        for part in PARTS
        if seconds.get(part, 0.0) > 0 and math.isfinite(seconds[part])
    )
    return shares, bool(recorded)


def _sum_parts(run: RunFacts) -> dict[str, float]:
    """Sum steps and evaluations of a run that recorded no breakdown."""
    trained = _trained_seconds(run)
    evaluated = _sum(run, metrics.EVAL_SECONDS) + _sum(run, metrics.TASK_SECONDS)
    waited = compute_waited_seconds(run)
    seconds = {"training": trained - waited, "data wait": waited, "evaluation": evaluated}
    return {part: value for part, value in seconds.items() if value > 0}


def _trained_seconds(run: RunFacts) -> float:
    return _sum(run, metrics.STEP_SECONDS)


def _sum(run: RunFacts, metric: str) -> float:
    return math.fsum(run.column(metric).finite)
