"""Curves of a run, thinned out so that many long runs fit one page: no extreme is lost, nor the first and last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from launcher.compare.facts import RunFacts
from launcher.compare.model import Axis, Series
from launcher.metrics import EVAL_SECONDS, STEP_SECONDS, TASK_SECONDS, TOKENS_SEEN, TOTAL_SECONDS

_ALL_POINTS = 150_000  # on a page, about 4 MB: what a browser draws in a fraction of a second
_FEWEST_POINTS, _MOST_POINTS = 300, 1_500  # of a series; a chart is about 1,000 pixels wide


def points_per_series(num_series: int) -> int:
    return max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(1, num_series)))


def make_series(facts: RunFacts, metric: str, max_points: int) -> Series | None:
    """None where the run never told this metric."""
    column = facts.column(metric)
    steps, values = column.steps, column.values
    if not column.tells:
        return None
    if len(values) <= max_points:
        return Series(metric=metric, step=tuple(steps), mean=tuple(map(_write, values)), low=None, high=None)
    bounds = _cut(len(values), max_points)
    finite = [[value for value in values[begin:end] if math.isfinite(value)] for begin, end in bounds]
    return Series(
        metric=metric,
        step=tuple(steps[(begin + end) // 2] for begin, end in bounds),
        mean=tuple(_write(math.fsum(told) / len(told)) if told else None for told in finite),
        low=tuple(_write(min(told)) if told else None for told in finite),
        high=tuple(_write(max(told)) if told else None for told in finite),
    )


def make_axis(facts: RunFacts, max_points: int) -> Axis:
    """Tokens and seconds at some steps. Seconds that were not recorded are added up from steps and evaluations."""
    steps = sorted({step for column in facts.columns.values() for step in column.steps})
    seconds = _find_seconds(facts, steps)
    tokens = _carry(facts, TOKENS_SEEN, steps)
    kept = _pick(range(len(steps)), max_points)
    return Axis(
        step=tuple(steps[index] for index in kept),
        tokens=None if tokens is None else tuple(_shorten(tokens[index]) for index in kept),
        seconds=None if seconds is None else tuple(_shorten(seconds[index]) for index in kept),
    )


def _find_seconds(facts: RunFacts, steps: Sequence[int]) -> list[float] | None:
    if facts.column(TOTAL_SECONDS).tells:
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
    """A step that does not tell stands where the one before it stood; none goes back."""
    column = facts.column(metric)
    if not column.tells:
        return None
    told = dict(zip(column.steps, column.values, strict=True))
    reached, carried = 0.0, []
    for step in steps:
        value = told.get(step)
        if value is not None and math.isfinite(value):
            reached = max(reached, value)
        carried.append(reached)
    return carried


def _cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Even buckets between the first and the last point, which stand alone."""
    inner = parts - 2
    bounds = [1 + round(index * (length - 2) / inner) for index in range(inner + 1)]
    middle = [(begin, end) for begin, end in pairwise(bounds) if begin < end]
    return [(0, 1), *middle, (length - 1, length)]


def _pick(indices: Sequence[int], most: int) -> list[int]:
    if len(indices) <= most:
        return list(indices)
    return [indices[round(place * (len(indices) - 1) / (most - 1))] for place in range(most)]


def _write(value: float) -> float | None:
    return _shorten(value) if math.isfinite(value) else None


def _shorten(value: float) -> float:
    """Six digits are more than a chart shows, and half the size."""
    return float(f"{value:.6g}")
