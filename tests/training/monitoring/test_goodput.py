"""Every second of a run is either goodput or lost time, across attempts."""

from __future__ import annotations

import time

import pytest

from launcher.core import metrics
from launcher.core.metrics import LOST_SECONDS, CutMetrics, StepMetrics
from launcher.training.monitoring.goodput import GoodputTracker, get_total_seconds
from launcher.training.runtime.startup_timer import read_process_start
from launcher.training.runtime.watchdog import Activity, Heartbeat


class ManualClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    hand = ManualClock()
    monkeypatch.setattr(time, "monotonic", hand)
    return hand


def spend(clock: ManualClock, heartbeat: Heartbeat, doing: Activity, seconds: float) -> None:
    heartbeat.beat(doing)
    clock.now += seconds


def row(step: int, values: dict[str, float]) -> StepMetrics:
    return StepMetrics(step=step, epoch=step / 10, values=values)


def test_every_second_is_accounted_for(clock: ManualClock) -> None:
    tracker = GoodputTracker(process_start=clock.now - 20)  # imports, loading
    heartbeat = Heartbeat()
    spend(clock, heartbeat, "compiling", 30)
    heartbeat.beat("starting")
    tracker.start(heartbeat, CutMetrics())
    spend(clock, heartbeat, "starting", 2)
    spend(clock, heartbeat, "waiting for data", 3)  # while the device has work
    spend(clock, heartbeat, "training", 100)
    spend(clock, heartbeat, "evaluating", 5)
    spend(clock, heartbeat, "saving", 4)
    spend(clock, heartbeat, "writing a checkpoint", 1)
    spend(clock, heartbeat, "training", 35)
    tracker.add(metrics.SKIPPED_SECONDS, 7)
    tracker.add(metrics.DATA_SECONDS, 2)
    values = tracker.read()
    assert values == {
        metrics.TOTAL_SECONDS: 200,
        metrics.GOODPUT: pytest.approx((3 + 100 + 35 - 7 - 2) / 200),
        metrics.START_SECONDS: 22,
        metrics.COMPILE_SECONDS: 30,
        metrics.DATA_SECONDS: 2,
        metrics.EVALUATION_SECONDS: 5,
        metrics.CHECKPOINT_SECONDS: 5,
        metrics.SKIPPED_SECONDS: 7,
        metrics.RESTART_SECONDS: 0,
    }


def test_repeated_steps_and_a_second_start_count_as_restart(clock: ManualClock) -> None:
    first = GoodputTracker(process_start=clock.now - 10)
    heartbeat = Heartbeat()
    first.start(heartbeat, CutMetrics())
    spend(clock, heartbeat, "training", 50)
    kept = row(5, first.read())  # at 60 s
    spend(clock, heartbeat, "training", 30)
    lost = row(8, first.read())  # at 90 s; then killed
    clock.now += 1000  # a pause does not count

    again = GoodputTracker(process_start=clock.now - 15)
    heartbeat = Heartbeat()
    again.start(heartbeat, CutMetrics(kept=(kept,), rest=(lost,)), get_total_seconds((kept, lost)))
    spend(clock, heartbeat, "starting", 1)
    spend(clock, heartbeat, "training", 45)
    values = again.read()
    assert values[metrics.TOTAL_SECONDS] == pytest.approx(90 + 15 + 46)
    assert values[metrics.START_SECONDS] == pytest.approx(10), "of the first attempt"
    assert values[metrics.RESTART_SECONDS] == pytest.approx(30 + 15 + 1)
    assert values[metrics.GOODPUT] == pytest.approx((50 + 45) / values[metrics.TOTAL_SECONDS])


def test_a_fallback_in_the_same_process_is_a_restart(clock: ManualClock) -> None:
    tracker = GoodputTracker(process_start=clock.now - 10)
    heartbeat = Heartbeat()
    tracker.start(heartbeat, CutMetrics())
    spend(clock, heartbeat, "training", 20)
    kept = row(2, tracker.read())  # at 30 s
    clock.now += 5  # out of memory, built again
    heartbeat = Heartbeat()
    tracker.start(heartbeat, CutMetrics(kept=(kept,)))
    spend(clock, heartbeat, "training", 15)
    values = tracker.read()
    assert values[metrics.TOTAL_SECONDS] == pytest.approx(50)
    assert values[metrics.RESTART_SECONDS] == pytest.approx(5)
    assert values[metrics.GOODPUT] == pytest.approx(35 / 50)


def test_an_attempt_that_died_before_its_first_row_keeps_the_total(clock: ManualClock) -> None:
    """It had dropped the rows after the checkpoint, whose times are recorded elsewhere."""
    kept = row(50, {metrics.TOTAL_SECONDS: 540.0, metrics.START_SECONDS: 40.0})
    third = GoodputTracker(process_start=clock.now - 20)
    heartbeat = Heartbeat()
    third.start(heartbeat, CutMetrics(kept=(kept,)), earlier_seconds=1040.0)
    spend(clock, heartbeat, "training", 40)
    values = third.read()
    assert values[metrics.TOTAL_SECONDS] == pytest.approx(1040 + 20 + 40)
    assert values[metrics.RESTART_SECONDS] == pytest.approx(500 + 20)
    assert values[metrics.START_SECONDS] == 40


def test_a_fallback_before_the_first_row_keeps_the_start_time(clock: ManualClock) -> None:
    tracker = GoodputTracker(process_start=clock.now - 10)
    heartbeat = Heartbeat()
    spend(clock, heartbeat, "compiling", 30)
    heartbeat.beat("starting")
    tracker.start(heartbeat, CutMetrics())
    clock.now += 5  # out of memory in the first step
    heartbeat = Heartbeat()
    tracker.start(heartbeat, CutMetrics())
    spend(clock, heartbeat, "training", 55)
    values = tracker.read()
    assert (values[metrics.START_SECONDS], values[metrics.COMPILE_SECONDS]) == (10, 30)
    assert values[metrics.RESTART_SECONDS] == pytest.approx(5)
    assert values[metrics.GOODPUT] == pytest.approx(0.55)


def test_rows_of_older_versions_without_times_are_accepted(clock: ManualClock) -> None:
    tracker = GoodputTracker(process_start=clock.now - 10)
    tracker.start(Heartbeat(), CutMetrics(kept=(row(3, {metrics.TRAIN_LOSS: 1.0}),)), 0.0)
    values = tracker.read()
    assert values[metrics.TOTAL_SECONDS] == pytest.approx(10)
    assert set(values) == {metrics.TOTAL_SECONDS, metrics.GOODPUT, *LOST_SECONDS}


def test_the_process_start_is_in_the_past() -> None:
    age = time.monotonic() - read_process_start()
    assert 0 < age < 3600 * 24
