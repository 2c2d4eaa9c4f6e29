"""Figures of a run: medians of what are numbers, nothing where nothing was measured."""

from __future__ import annotations

import math

import pytest

from launcher import metrics
from launcher.metrics import StepMetrics
from launcher.report.figures import (
    draw_sparkline,
    find_course,
    find_data_wait,
    find_energy,
    find_goodput,
    find_last_task_metrics,
    find_median,
    find_total_seconds,
    format_metric,
)
from tests.unit.report.made_run import make_facts, make_outcome


def rows(name: str, *values: float) -> list[StepMetrics]:
    return [StepMetrics(step=step, epoch=0.0, values={name: value}) for step, value in enumerate(values, start=1)]


def test_medians_pass_over_what_is_no_number() -> None:
    assert find_median(rows("x", 1.0, math.nan, 3.0, math.inf, 2.0), "x") == 2.0
    assert find_median(rows("x", math.nan), "x") is None
    assert find_median([], "x") is None


def test_a_course_has_its_best_step() -> None:
    course = find_course(rows("x", 3.0, 1.0, math.nan, 2.0), "x")
    assert course is not None
    assert (course.first, course.last, course.best, course.best_step) == (3.0, 2.0, 1.0, 2)
    assert find_course(rows("x", math.nan), "x") is None


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ((), ""),
        ((1.0,), "▁"),
        ((1.0, 1.0), "▁▁"),
        ((8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), "█▇▆▅▄▃▂▁"),
        (tuple([2.0] * 480 + [1.0] * 480), "█" * 24 + "▁" * 24),
    ],
)
def test_sparklines(values: tuple[float, ...], drawn: str) -> None:
    assert draw_sparkline(values) == drawn


def test_the_wait_for_data_is_the_devices_where_it_is_known() -> None:
    both = {metrics.DATA_WAIT_SHARE: 0.1, metrics.DATA_WAIT_SECONDS: 1.0, metrics.STEP_SECONDS: 2.0}
    assert find_data_wait([StepMetrics(step=1, epoch=0.0, values=both)]) == ("device waits for data", 0.1)
    del both[metrics.DATA_WAIT_SHARE]
    assert find_data_wait([StepMetrics(step=1, epoch=0.0, values=both)]) == ("host waits for data", 0.5)
    assert find_data_wait(rows(metrics.STEP_SECONDS, 1.0)) is None


def test_energy_counts_only_steps_that_tell_all_of_it() -> None:
    whole = {metrics.JOULES_PER_TOKEN: 2.0, metrics.TOKENS_PER_SECOND: 900.0, metrics.STEP_SECONDS: 2.0}
    told = [StepMetrics(step=1, epoch=0.0, values=whole), *rows(metrics.STEP_SECONDS, 5.0)]
    assert find_energy(told) == 1.0
    assert find_energy(rows(metrics.STEP_SECONDS, 5.0)) is None


def test_the_total_is_what_the_run_counted_else_what_its_starts_took() -> None:
    assert find_total_seconds(make_facts(outcome=make_outcome()).record) == 20.0
    assert find_total_seconds(make_facts(outcome=make_outcome(goodput={})).record) == 18.0
    assert find_total_seconds(make_facts(outcome=make_outcome(goodput={}), rows=()).record) == 20.0
    assert find_total_seconds(make_facts(outcome=None, rows=()).record) is None


def test_goodput_is_the_ends_else_that_of_the_last_row() -> None:
    told = tuple(rows(metrics.GOODPUT, 0.1, 0.5))
    assert find_goodput(make_facts(outcome=make_outcome(goodput={}), rows=told).record) == {metrics.GOODPUT: 0.5}
    assert find_goodput(make_facts(outcome=make_outcome(), rows=told).record)[metrics.GOODPUT] == 0.75


def test_task_metrics_are_the_last_of_each() -> None:
    told = [*rows("eval/exact_match", 0.1, 0.4), *rows(metrics.EVAL_LOSS, 1.0), *rows("train/other", 1.0)]
    assert find_last_task_metrics(told) == {"eval/exact_match": (0.4, 2)}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (metrics.DEVICE_MFU, 0.4321, "43.2 %"),
        (metrics.TOKENS_PER_SECOND, 12345.6, "12,346 tokens/s"),
        (metrics.SAMPLES_PER_SECOND, 8.123, "8.12 rows/s"),
        (metrics.STEP_SECONDS, 0.1234, "0.123 s"),
        (metrics.TOTAL_SECONDS, 7200.0, "2.0 h"),
        (metrics.PEAK_ALLOCATED_GIB, 3.456, "3.46 GiB"),
        (metrics.JOULES_PER_TOKEN, 0.01234, "0.0123 J"),
        (metrics.TRAIN_LOSS, 1.23456, "1.235"),
        ("eval/exact_match", 0.5, "0.5"),
    ],
)
def test_metrics_are_written_in_their_units(name: str, value: float, words: str) -> None:
    assert format_metric(name, value) == words
