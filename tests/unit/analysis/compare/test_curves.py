"""Downsampled curves keep their extremes within the requested number of points."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.analysis.compare.curves import compute_max_points, make_axis, make_series, make_shares
from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.model import Series
from launcher.core import metrics
from tests.unit.analysis.compare.made_facts import make_column, make_facts


def thin(values: list[float], most: int) -> Series:
    series = make_series(make_facts("a", {metrics.TRAIN_LOSS: values}), metrics.TRAIN_LOSS, most)
    assert series is not None
    return series


@given(st.lists(st.integers(-1000, 1000), min_size=40, max_size=400), st.integers(5, 30))
def test_extremes_ends_and_the_mean_survive(numbers: list[int], most: int) -> None:
    values = [float(number) for number in numbers]
    series = thin(values, most)
    assert series.low is not None
    assert series.high is not None
    assert len(series.step) <= most
    assert min(low for low in series.low if low is not None) == min(values)
    assert max(high for high in series.high if high is not None) == max(values)
    assert (series.step[0], series.mean[0]) == (1, values[0])
    assert (series.step[-1], series.mean[-1]) == (len(values), values[-1])
    assert list(series.step) == sorted(set(series.step))


def test_a_short_curve_keeps_every_step() -> None:
    assert thin([3.0, 2.0, 1.0], 300) == Series(
        metric=metrics.TRAIN_LOSS, step=(1, 2, 3), mean=(3.0, 2.0, 1.0), low=None, high=None
    )


def test_one_spike_in_ten_thousand_steps_is_kept() -> None:
    values = [1.0] * 10_000
    values[5_432] = 99.0
    series = thin(values, 300)
    assert series.high is not None
    assert max(high for high in series.high if high is not None) == 99.0
    assert max(mean for mean in series.mean if mean is not None) < 5


def test_non_finite_values_break_the_curve() -> None:
    assert thin([1.0, math.nan, math.inf, 4.0], 300).mean == (1.0, None, None, 4.0)
    assert make_series(make_facts("a", {metrics.TRAIN_LOSS: [math.nan] * 3}), metrics.TRAIN_LOSS, 300) is None
    assert make_series(make_facts("a"), metrics.DEVICE_MFU, 300) is None


def test_many_series_get_fewer_points_each() -> None:
    assert compute_max_points(8) == 1_500
    assert 300 <= compute_max_points(450) < 400
    assert compute_max_points(10_000) == 300
    assert compute_max_points(0) == 1_500


def test_recorded_clock_is_used() -> None:
    run = make_facts(
        "a",
        {
            metrics.TRAIN_LOSS: [1, 1, 1],
            metrics.TOKENS_SEEN: [10, 20, 30],
            metrics.TOTAL_SECONDS: [5, 9, 8],
            metrics.STEP_SECONDS: [1, 1, 1],
        },
    )
    axis = make_axis(run, 300)
    assert axis.step == (1, 2, 3)
    assert axis.tokens == (10.0, 20.0, 30.0)
    assert axis.seconds == (5.0, 9.0, 9.0)  # it never goes back


def test_clock_falls_back_to_steps_and_evaluations() -> None:
    run = make_facts("a", {metrics.TRAIN_LOSS: [1, 1, 1], metrics.STEP_SECONDS: [2, 2, 2]})
    columns = {**run.columns, metrics.EVAL_SECONDS: make_column([10], [2])}
    axis = make_axis(replace(run, columns=columns), 300)
    assert axis.seconds == (2.0, 4.0, 16.0)  # the second step ended before its evaluation
    assert axis.tokens is None


def test_long_axis_is_downsampled_between_its_ends() -> None:
    run: RunFacts = make_facts("a", {metrics.TOKENS_SEEN: [float(step) for step in range(1, 5_001)]})
    axis = make_axis(run, 300)
    assert (axis.step[0], axis.step[-1], len(axis.step)) == (1, 5_000, 300)
    assert axis.tokens == tuple(map(float, axis.step))


@pytest.mark.parametrize("length", [301, 302, 599, 600, 601, 4_999])
def test_every_step_is_in_one_bucket(length: int) -> None:
    """The mean of all is the buckets' mean, by how many steps each has: nothing is counted twice or left out."""
    from launcher.analysis.compare.curves import _cut

    bounds = _cut(length, 300)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == length


def seconds(run: RunFacts) -> dict[str, float]:
    return {share.part: share.seconds for share in make_shares(run)[0]}


def test_parts_sum_to_the_wall_clock_time() -> None:
    run = make_facts(
        "a",
        {metrics.TOTAL_SECONDS: [50.0, 100.0]},
        goodput={
            metrics.GOODPUT: 0.6,
            metrics.START_SECONDS: 10.0,
            metrics.COMPILE_SECONDS: 15.0,
            metrics.DATA_SECONDS: 2.0,
            metrics.EVALUATION_SECONDS: 5.0,
            metrics.CHECKPOINT_SECONDS: 1.0,
            metrics.RESTART_SECONDS: 3.0,
            metrics.SKIPPED_SECONDS: 0.0,
        },
    )
    breakdown = seconds(run)
    assert breakdown == {
        "training": 60.0,
        "data wait": 2.0,
        "evaluation": 5.0,
        "checkpoints": 1.0,
        "compiling": 15.0,
        "start": 10.0,
        "restarts": 3.0,
        "other": 4.0,
    }
    assert make_shares(run)[1]


def test_without_goodput_training_is_the_steps_without_their_waits() -> None:
    run = make_facts("a", {metrics.STEP_SECONDS: [10.0, 10.0]}, goodput={metrics.DATA_SECONDS: 3.0})
    assert seconds(run) == {"training": 17.0, "data wait": 3.0}


def test_breakdown_falls_back_to_steps_and_evaluations() -> None:
    columns = {metrics.STEP_SECONDS: [10.0, 10.0], metrics.DATA_WAIT_SECONDS: [1.0, 99.0], metrics.EVAL_SECONDS: [5.0]}
    run = make_facts("a", columns, attempt_seconds=40.0)
    assert seconds(run) == {"training": 9.0, "data wait": 11.0, "evaluation": 5.0, "other": 15.0}
    assert not make_shares(run)[1]


def test_device_data_wait_is_preferred() -> None:
    columns = {metrics.STEP_SECONDS: [10.0], metrics.DATA_WAIT_SHARE: [0.2], metrics.DATA_WAIT_SECONDS: [9.0]}
    assert seconds(make_facts("a", columns)) == pytest.approx({"training": 8.0, "data wait": 2.0})


def test_parts_longer_than_the_clock_leave_no_other_time() -> None:
    run = make_facts("a", {metrics.STEP_SECONDS: [10.0]}, attempt_seconds=1.0)
    assert seconds(run) == {"training": 10.0}
    assert make_shares(make_facts("a")) == ((), False)
