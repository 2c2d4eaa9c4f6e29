"""How sure a ratio of speeds is: a bootstrap over rounds, made wide enough for few of them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_ROUNDS = 5  # of fewer, no resampling makes an interval that holds the truth 19 times in 20
_RESAMPLES = 10_000
_SEED = 20_261_115
# Student's t for 95 %, by degrees of freedom. Of more, the last one is taken: a little wider than it need be.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A ratio and where it lies with a confidence of 95 %."""

    ratio: float
    low: float
    high: float

    @property
    def inverse(self) -> Interval:
        return Interval(ratio=1 / self.ratio, low=1 / self.high, high=1 / self.low)


def estimate_ratio(speeds: Sequence[float], others: Sequence[float]) -> Interval:
    """Of one side's speeds to another's, round by round: what a round had in common cancels out."""
    assert len(speeds) == len(others) >= LEAST_ROUNDS
    logs = [math.log(speed / other) for speed, other in zip(speeds, others, strict=True)]
    low, high = _bootstrap(logs)
    return Interval(ratio=math.exp(statistics.fmean(logs)), low=math.exp(low), high=math.exp(high))


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentiles of resampled means, further out the fewer values there are.

    Plain percentiles of a few values hold the truth less often than they say: a resample varies less than a new sample
    would. The percentiles are moved to where Student's t would put them.
    """
    generator = random.Random(_SEED)
    means = sorted(statistics.fmean(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    outside = _share_outside(len(values))
    last = _RESAMPLES - 1
    return means[math.floor(outside * last)], means[math.ceil((1 - outside) * last)]


def _share_outside(count: int) -> float:
    """On each end."""
    student = _STUDENT[min(count - 1, len(_STUDENT)) - 1]
    return statistics.NormalDist().cdf(-student * math.sqrt(count / (count - 1)))
