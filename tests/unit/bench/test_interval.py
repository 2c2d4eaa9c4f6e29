"""An interval that says 95 % holds the truth about as often; and what it says is put into the right words."""

from __future__ import annotations

import math
import random

import pytest

from launcher.bench import interval as module
from launcher.bench.interval import LEAST_ROUNDS, Interval, estimate_ratio
from launcher.bench.verdict import format_verdict


def draw(generator: random.Random, count: int, mean: float = 1.0, spread: float = 0.03) -> list[float]:
    return [mean * math.exp(generator.gauss(0.0, spread)) for _ in range(count)]


@pytest.mark.parametrize("count", [LEAST_ROUNDS, 7, 12])
def test_the_truth_is_inside_about_nineteen_times_in_twenty(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESAMPLES", 1000)
    generator = random.Random(5)
    trials = [estimate_ratio(draw(generator, count, 1.2), draw(generator, count)) for _ in range(200)]
    held = sum(trial.low <= 1.2 <= trial.high for trial in trials)
    assert 0.89 * 200 <= held <= 0.99 * 200


def test_what_a_round_has_in_common_cancels_out() -> None:
    """A machine that is half as fast in two rounds says nothing about the sides."""
    rounds = [1.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    found = estimate_ratio([120.0 * share for share in rounds], [100.0 * share for share in rounds])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.2, 1.2, 1.2))


def test_the_same_numbers_make_the_same_interval() -> None:
    speeds, others = draw(random.Random(1), 7), draw(random.Random(2), 7)
    assert estimate_ratio(speeds, others) == estimate_ratio(speeds, others)


def test_more_rounds_are_surer() -> None:
    widths = []
    for count in (5, 40):
        found = estimate_ratio(draw(random.Random(3), count), draw(random.Random(4), count))
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 2


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((1.32, 1.29, 1.35), "A is 1.32 times as fast as B (1.29 to 1.35)"),
        ((0.5, 0.4, 0.625), "B is 2.00 times as fast as A (1.60 to 2.50)"),
        ((1.004, 0.97, 1.02), "A and B: no difference seen: 0.97 to 1.02; more repeats could tell"),
        ((1.0, 0.995, 1.004), "A and B: no difference, to within 1 % (0.995 to 1.004)"),
        ((1.006, 1.004, 1.009), "A and B: no difference, to within 1 % (1.004 to 1.009)"),
    ],
)
def test_words(bounds: tuple[float, float, float], words: str) -> None:
    ratio, low, high = bounds
    assert format_verdict("A", "B", Interval(ratio=ratio, low=low, high=high)) == words
