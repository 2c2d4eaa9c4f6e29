"""Bootstrap confidence interval of a speed ratio, widened for few rounds, and the verdict it supports."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROUNDS = 5  # with fewer rounds no resampling gives an interval with 95 % coverage
_RESAMPLES = 10_000
_SEED = 20_261_115
# Two-sided 95 % quantiles of Student's t by degrees of freedom. Beyond them the last is used: slightly too wide.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_EQUIVALENCE_MARGIN = 0.01  # a smaller difference is no reason to change a setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A ratio with its 95 % confidence interval."""

    ratio: float
    low: float
    high: float

    @property
    def inverse(self) -> Interval:
        """The interval of the inverse ratio."""
        return Interval(ratio=1 / self.ratio, low=1 / self.high, high=1 / self.low)


def estimate_ratio(speeds: Sequence[float], others: Sequence[float]) -> Interval:
    """Estimate the ratio of two variants' speeds, paired by round so that drift of the machine cancels."""
    assert len(speeds) == len(others) >= MIN_ROUNDS
    logs = [math.log(speed / other) for speed, other in zip(speeds, others, strict=True)]
    low, high = _bootstrap(logs)
    return Interval(ratio=math.exp(statistics.fmean(logs)), low=math.exp(low), high=math.exp(high))


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of a 95 % bootstrap confidence interval of the mean.

    Plain percentiles of few values under-cover, because a resample varies less than a new sample. The percentiles are
    therefore moved outward to where Student's t puts them.
    """
    generator = random.Random(_SEED)
    means = sorted(statistics.fmean(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail, last = _tail_probability(len(values)), _RESAMPLES - 1
    return means[math.floor(tail * last)], means[math.ceil((1 - tail) * last)]


def _tail_probability(count: int) -> float:
    student = _STUDENT[min(count - 1, len(_STUDENT)) - 1]
    return statistics.NormalDist().cdf(-student * math.sqrt(count / (count - 1)))


def format_verdict(label: str, other: str, interval: Interval) -> str:
    """Format which variant is faster, naming the faster one first; `interval` is label's speed over other's."""
    bounds = f"{_format_bound(interval.low)} to {_format_bound(interval.high)}"
    if interval.low >= 1 - _EQUIVALENCE_MARGIN and interval.high <= 1 + _EQUIVALENCE_MARGIN:
        return f"{label} and {other}: no difference, to within 1 % ({bounds})"
    if interval.low > 1:
        return f"{label} is {interval.ratio:.2f} times as fast as {other} ({bounds})"
    if interval.high < 1:
        return format_verdict(other, label, interval.inverse)
    return f"{label} and {other}: no significant difference: {bounds}; more repeats may show one"


def _format_bound(bound: float) -> str:
    """Format a bound of the interval, with three decimals close to 1, where two would show 1.00."""
    return f"{bound:.3f}" if 0.99 <= bound <= 1.01 else f"{bound:.2f}"
