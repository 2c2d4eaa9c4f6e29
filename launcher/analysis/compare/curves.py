"""Curves of a run, downsampled so that many long runs fit on one page, and its time breakdown by activity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.model import Axis, Series, Share
from launcher.analysis.compare.summary_metrics import (
    compute_waited_seconds,
    compute_wall_clock,
    round_digits,
    round_finite,
)
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
    """Return the maximum number of points per curve, so that all curves of a page together stay small enough."""
    return max(_MIN_POINTS, min(_MAX_POINTS, _PAGE_POINTS // max(1, num_series)))


def make_series(facts: RunFacts, metric: str, max_points: int) -> Series | None:
    """Return the downsampled curve of a metric; None if the run has no finite value of it."""
    column = facts.column(metric)
    steps, values = column.steps, column.values
    if not column.has_values:
        return None
    if len(values) <= max_points:
        return Series(metric=metric, step=tuple(steps), mean=tuple(map(round_finite, values)), low=None, high=None)
    bounds = _cut(len(values), max_points)
    finite = [[value for value in values[begin:end] if math.isfinite(value)] for begin, end in bounds]
    return Series(
        metric=metric,
        step=tuple(steps[(begin + end) // 2] for begin, end in bounds),
        mean=tuple(round_finite(math.fsum(bucket) / len(bucket)) if bucket else None for bucket in finite),
        low=tuple(round_finite(min(bucket)) if bucket else None for bucket in finite),
        high=tuple(round_finite(max(bucket)) if bucket else None for bucket in finite),
    )


def make_axis(facts: RunFacts, max_points: int) -> Axis:
    """Return the x-axis values of a run: steps, tokens seen and elapsed seconds, which are summed if not recorded."""
    steps = sorted({step for column in facts.columns.values() for step in column.steps})
    seconds = _compute_seconds(facts, steps)
    tokens = _carry(facts, TOKENS_SEEN, steps)
    kept: Sequence[int] = range(len(steps))
    if len(steps) > max_points:
        kept = [round(number * (len(steps) - 1) / (max_points - 1)) for number in range(max_points)]
    return Axis(
        step=tuple(steps[index] for index in kept),
        tokens=None if tokens is None else tuple(round_digits(tokens[index]) for index in kept),
        seconds=None if seconds is None else tuple(round_digits(seconds[index]) for index in kept),
    )


def _compute_seconds(facts: RunFacts, steps: Sequence[int]) -> list[float] | None:
    if facts.column(TOTAL_SECONDS).has_values:
        return _carry(facts, TOTAL_SECONDS, steps)
    step_seconds, eval_seconds, task_seconds = (
        facts.column(name).by_step for name in (STEP_SECONDS, EVAL_SECONDS, TASK_SECONDS)
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
    """Return the running maximum of a metric at each step; None if the run has no values of it."""
    values = facts.column(metric).by_step
    return [*accumulate((values.get(step, 0.0) for step in steps), max)] if values else None


def _cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Return bounds of equal buckets; the first and the last point are buckets by themselves."""
    inner = parts - 2
    bounds = [1 + round(index * (length - 2) / inner) for index in range(inner + 1)]
    middle = [(begin, end) for begin, end in pairwise(bounds) if begin < end]
    return [(0, 1), *middle, (length - 1, length)]


def make_shares(run: RunFacts) -> tuple[tuple[Share, ...], bool]:
    """Return the time spent on each activity, in a fixed order without zeros, and whether the run recorded it."""
    recorded = {part: value for part, name in _RECORDED.items() if (value := run.last(name)) is not None}
    seconds, total = dict(recorded), compute_wall_clock(run)
    in_steps = math.fsum(run.column(STEP_SECONDS).finite)
    if recorded:
        goodput = run.last(metrics.GOODPUT)
        inside = math.fsum(recorded.get(part, 0.0) for part in ("data wait", "skipped steps"))  # part of the step time
        trained = total * goodput if total is not None and goodput is not None else in_steps - inside
        seconds["training"] = max(0.0, trained)
    else:
        waited = compute_waited_seconds(run)
        evaluated = math.fsum([*run.column(EVAL_SECONDS).finite, *run.column(TASK_SECONDS).finite])
        seconds = {"training": in_steps - waited, "data wait": waited, "evaluation": evaluated}
    if total is not None and any(seconds.values()):
        rest = total - math.fsum(seconds.values())
        if rest > _MIN_OTHER * total:
            seconds["other"] = rest
    shares = tuple(
        Share(part=part, seconds=round_digits(seconds[part]))
        for part in PARTS
        if seconds.get(part, 0.0) > 0 and math.isfinite(seconds[part])
    )
    return shares, bool(recorded)
