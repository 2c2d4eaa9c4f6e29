"""Rates and changes against published values and simulations."""

from __future__ import annotations

import random

import pytest

from launcher.judges.gate import check_change
from launcher.judges.statistics import compare_paired, compute_rate


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
    rate = compute_rate([True] * passed + [False] * (total - passed) + [None] * 3)
    assert (rate.num_passed, rate.num_judged) == (passed, total)
    assert rate.low == pytest.approx(low, abs=5e-5)
    assert rate.high == pytest.approx(high, abs=5e-5)


def test_rate_without_judged_rows_has_the_full_interval() -> None:
    rate = compute_rate([None, None])
    assert (rate.value, rate.low, rate.high) == (0.0, 0.0, 1.0)


def test_only_changed_rows_affect_the_p_value() -> None:
    before = [True] * 50 + [False] * 50 + [None, True]
    now = [True] * 40 + [False] * 10 + [True] * 2 + [False] * 48 + [True, None]
    change = compare_paired(before, now)
    assert (change.num_rows, change.num_lost, change.num_won) == (100, 10, 2)
    assert change.difference == pytest.approx(-0.08)
    assert change.p_worse == pytest.approx(79 / 4096), "10 or more of 12 tosses"
    assert change.low < -0.08 < change.high < 0


def test_many_rows_use_the_normal_approximation() -> None:
    before = [True] * 3000 + [False] * 3000
    assert compare_paired(before, [not one for one in before]).p_worse == pytest.approx(0.5, abs=0.01)
    changed = [False] * 1100 + [True] * 1900 + [True] * 1000 + [False] * 2000
    near = compare_paired(before, changed).p_worse
    assert near == pytest.approx(0.0154, abs=0.0005)  # exactly 0.01536


def test_gate_closes_on_a_significant_drop_only() -> None:
    before = [True] * 190 + [False] * 10
    closed = check_change(compare_paired(before, [False] * 20 + before[20:]), 0.05)
    assert not closed.is_open
    assert closed.message.startswith(
        "worse by more than 5.0 %: 20 of 200 rows newly wrong, 0 newly right: -10.0 points"
    )
    small = check_change(compare_paired(before, [False] * 6 + before[6:]), 0.05)
    assert small.is_open, "real, and smaller than allowed"
    few = check_change(compare_paired([True] * 9 + [False], [False] * 2 + [True] * 7 + [False]), 0.05)
    assert few.is_open
    assert "too few rows to rule out" in few.message
    assert check_change(compare_paired(before, before), 0.05).message.startswith(
        "not worse by more than 5.0 %: 0 of 200"
    )
    assert not check_change(compare_paired([], []), 0.05).is_open


def test_false_alarm_rate_of_the_gate_is_at_most_five_percent() -> None:
    """Two sets of answers that are right with the same chance, row by row."""
    chance = random.Random(0)
    closed = 0
    for _ in range(2000):
        skill = [chance.random() for _ in range(100)]
        before, now = ([chance.random() < one for one in skill] for _ in range(2))
        closed += not check_change(compare_paired(before, now), 0.02).is_open
    assert closed / 2000 < 0.05
    assert closed > 0, "or the test would show nothing"
