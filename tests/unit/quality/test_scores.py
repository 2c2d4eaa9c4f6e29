"""Rates and changes, against values that others publish, and against chance itself."""

from __future__ import annotations

import random

import pytest

from launcher.quality.gate import judge_change
from launcher.quality.scores import make_change, make_rate


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),  # Wilson, as in Newcombe (1998) and every table of it
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval(passed: int, total: int, low: float, high: float) -> None:
    rate = make_rate([True] * passed + [False] * (total - passed) + [None] * 3)
    assert (rate.num_passed, rate.num_judged) == (passed, total)
    assert rate.low == pytest.approx(low, abs=5e-5)
    assert rate.high == pytest.approx(high, abs=5e-5)


def test_nothing_judged_is_nothing_known() -> None:
    rate = make_rate([None, None])
    assert (rate.value, rate.low, rate.high) == (0.0, 0.0, 1.0)


def test_only_rows_that_changed_tell_of_a_change() -> None:
    before = [True] * 50 + [False] * 50 + [None, True]
    now = [True] * 40 + [False] * 10 + [True] * 2 + [False] * 48 + [True, None]
    change = make_change(before, now)
    assert (change.num_rows, change.num_lost, change.num_won) == (100, 10, 2)
    assert change.difference == pytest.approx(-0.08)
    assert change.p_worse == pytest.approx(79 / 4096), "10 or more of 12 tosses"
    assert change.low < -0.08 < change.high < 0


def test_many_rows_go_by_the_normal_curve() -> None:
    before = [True] * 3000 + [False] * 3000
    assert make_change(before, [not one for one in before]).p_worse == pytest.approx(0.5, abs=0.01)
    changed = [False] * 1100 + [True] * 1900 + [True] * 1000 + [False] * 2000
    near = make_change(before, changed).p_worse
    assert near == pytest.approx(0.0154, abs=0.0005)  # exactly 0.01536


def test_a_real_drop_closes_the_gate_and_an_accident_does_not() -> None:
    before = [True] * 190 + [False] * 10
    closed = judge_change(make_change(before, [False] * 20 + before[20:]), 0.05)
    assert not closed.is_open
    assert closed.words.startswith("worse by more than 5.0 %: 20 of 200 rows lost, 0 won: -10.0 points")
    small = judge_change(make_change(before, [False] * 6 + before[6:]), 0.05)
    assert small.is_open, "real, and smaller than allowed"
    few = judge_change(make_change([True] * 9 + [False], [False] * 2 + [True] * 7 + [False]), 0.05)
    assert few.is_open
    assert "none is excluded" in few.words
    assert judge_change(make_change(before, before), 0.05).words.startswith("not worse by more than 5.0 %: 0 of 200")
    assert not judge_change(make_change([], []), 0.05).is_open


def test_chance_alone_closes_it_once_in_twenty_times_at_most() -> None:
    """Two sets of answers that are right with the same chance, row by row."""
    chance = random.Random(0)
    closed = 0
    for _ in range(2000):
        skill = [chance.random() for _ in range(100)]
        before, now = ([chance.random() < one for one in skill] for _ in range(2))
        closed += not judge_change(make_change(before, now), 0.02).is_open
    assert closed / 2000 < 0.05
    assert closed > 0, "or the test would show nothing"
