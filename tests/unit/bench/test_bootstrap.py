"""The bootstrap interval has 95 % coverage, and the verdict follows from it."""

from __future__ import annotations

import math
import random

import pytest

from launcher.bench import bootstrap as module
from launcher.bench.bootstrap import MIN_ROUNDS, Interval, estimate_ratio, format_verdict

pytestmark = pytest.mark.long


def draw(generator: random.Random, count: int, mean: float = 1.0, spread: float = 0.03) -> list[float]:
    return [mean * math.exp(generator.gauss(0.0, spread)) for _ in range(count)]


@pytest.mark.parametrize("count", [MIN_ROUNDS, 7, 12])
def test_interval_covers_the_true_ratio_in_95_percent_of_trials(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESAMPLES", 1000)
    generator = random.Random(5)
    trials = [estimate_ratio(draw(generator, count, 1.2), draw(generator, count)) for _ in range(200)]
    num_covered = sum(trial.low <= 1.2 <= trial.high for trial in trials)
    assert 0.89 * 200 <= num_covered <= 0.99 * 200


def test_drift_common_to_a_round_cancels() -> None:
    """The machine is half as fast in two rounds."""
    rounds = [1.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    interval = estimate_ratio([120.0 * share for share in rounds], [100.0 * share for share in rounds])
    assert (interval.ratio, interval.low, interval.high) == pytest.approx((1.2, 1.2, 1.2))


def test_interval_is_deterministic() -> None:
    speeds, others = draw(random.Random(1), 7), draw(random.Random(2), 7)
    assert estimate_ratio(speeds, others) == estimate_ratio(speeds, others)


def test_interval_narrows_with_more_rounds() -> None:
    widths = []
    for count in (5, 40):
        interval = estimate_ratio(draw(random.Random(3), count), draw(random.Random(4), count))
        widths.append(interval.high - interval.low)
    assert widths[1] < widths[0] / 2


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ((1.32, 1.29, 1.35), "A is 1.32 times as fast as B (1.29 to 1.35)"),
        ((0.5, 0.4, 0.625), "B is 2.00 times as fast as A (1.60 to 2.50)"),
        ((1.004, 0.97, 1.02), "A and B: no significant difference: 0.97 to 1.02; more repeats may show one"),
        ((1.0, 0.995, 1.004), "A and B: no difference, to within 1 % (0.995 to 1.004)"),
        ((1.006, 1.004, 1.009), "A and B: no difference, to within 1 % (1.004 to 1.009)"),
    ],
)
def test_verdict_follows_from_the_interval(bounds: tuple[float, float, float], text: str) -> None:
    ratio, low, high = bounds
    assert format_verdict("A", "B", Interval(ratio=ratio, low=low, high=high)) == text
