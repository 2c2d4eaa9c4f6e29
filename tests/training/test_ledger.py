"""Where the seconds go: every second of a run is either trained or told as lost, across attempts."""

from __future__ import annotations

import time

import pytest

from launcher import metrics
from launcher.metrics import LOST_SECONDS, CutMetrics, StepMetrics
from launcher.training.ledger import Ledger, find_process_start, find_spent
from launcher.training.watchdog import Doing, Pulse


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(time, "monotonic", hand)
    return hand


def spend(clock: Hand, pulse: Pulse, doing: Doing, seconds: float) -> None:
    pulse.beat(doing)
    clock.now += seconds


def row(step: int, values: dict[str, float]) -> StepMetrics:
    return StepMetrics(step=step, epoch=step / 10, values=values)


def test_every_second_has_its_place(clock: Hand) -> None:
    ledger = Ledger(process_began=clock.now - 20)  # imports, loading
    pulse = Pulse()
    spend(clock, pulse, "compiling", 30)
    pulse.beat("starting")
    ledger.begin(pulse, CutMetrics())
    spend(clock, pulse, "starting", 2)
    spend(clock, pulse, "waiting for data", 3)  # beside a device that has work
    spend(clock, pulse, "training", 100)
    spend(clock, pulse, "evaluating", 5)
    spend(clock, pulse, "saving", 4)
    spend(clock, pulse, "writing a checkpoint", 1)
    spend(clock, pulse, "training", 35)
    ledger.book(metrics.SKIPPED_SECONDS, 7)
    ledger.book(metrics.DATA_SECONDS, 2)
    told = ledger.read()
    assert told == {
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


def test_what_was_trained_in_vain_and_a_second_start_are_lost_to_restarts(clock: Hand) -> None:
    first = Ledger(process_began=clock.now - 10)
    pulse = Pulse()
    first.begin(pulse, CutMetrics())
    spend(clock, pulse, "training", 50)
    kept = row(5, first.read())  # at 60 s
    spend(clock, pulse, "training", 30)
    lost = row(8, first.read())  # at 90 s, killed behind it
    clock.now += 1000  # nobody pays for a pause

    again = Ledger(process_began=clock.now - 15)
    pulse = Pulse()
    again.begin(pulse, CutMetrics(kept=(kept,), rest=(lost,)), find_spent((kept, lost)))
    spend(clock, pulse, "starting", 1)
    spend(clock, pulse, "training", 45)
    told = again.read()
    assert told[metrics.TOTAL_SECONDS] == pytest.approx(90 + 15 + 46)
    assert told[metrics.START_SECONDS] == pytest.approx(10), "of the first attempt"
    assert told[metrics.RESTART_SECONDS] == pytest.approx(30 + 15 + 1)
    assert told[metrics.GOODPUT] == pytest.approx((50 + 45) / told[metrics.TOTAL_SECONDS])


def test_one_rung_lower_in_the_same_process_is_a_restart(clock: Hand) -> None:
    ledger = Ledger(process_began=clock.now - 10)
    pulse = Pulse()
    ledger.begin(pulse, CutMetrics())
    spend(clock, pulse, "training", 20)
    kept = row(2, ledger.read())  # at 30 s
    clock.now += 5  # out of memory, assembled anew
    pulse = Pulse()
    ledger.begin(pulse, CutMetrics(kept=(kept,)))
    spend(clock, pulse, "training", 15)
    told = ledger.read()
    assert told[metrics.TOTAL_SECONDS] == pytest.approx(50)
    assert told[metrics.RESTART_SECONDS] == pytest.approx(5)
    assert told[metrics.GOODPUT] == pytest.approx(35 / 50)


def test_an_attempt_that_died_before_its_first_row_does_not_turn_the_clock_back(clock: Hand) -> None:
    """It had cut the rows behind the checkpoint: what they told is known from elsewhere."""
    kept = row(50, {metrics.TOTAL_SECONDS: 540.0, metrics.START_SECONDS: 40.0})
    third = Ledger(process_began=clock.now - 20)
    pulse = Pulse()
    third.begin(pulse, CutMetrics(kept=(kept,)), earlier_seconds=1040.0)
    spend(clock, pulse, "training", 40)
    told = third.read()
    assert told[metrics.TOTAL_SECONDS] == pytest.approx(1040 + 20 + 40)
    assert told[metrics.RESTART_SECONDS] == pytest.approx(500 + 20)
    assert told[metrics.START_SECONDS] == 40


def test_one_rung_lower_before_the_first_row_keeps_what_the_start_took(clock: Hand) -> None:
    ledger = Ledger(process_began=clock.now - 10)
    pulse = Pulse()
    spend(clock, pulse, "compiling", 30)
    pulse.beat("starting")
    ledger.begin(pulse, CutMetrics())
    clock.now += 5  # out of memory in the first step
    pulse = Pulse()
    ledger.begin(pulse, CutMetrics())
    spend(clock, pulse, "training", 55)
    told = ledger.read()
    assert (told[metrics.START_SECONDS], told[metrics.COMPILE_SECONDS]) == (10, 30)
    assert told[metrics.RESTART_SECONDS] == pytest.approx(5)
    assert told[metrics.GOODPUT] == pytest.approx(0.55)


def test_rows_of_older_versions_have_no_times(clock: Hand) -> None:
    ledger = Ledger(process_began=clock.now - 10)
    ledger.begin(Pulse(), CutMetrics(kept=(row(3, {metrics.TRAIN_LOSS: 1.0}),)), 0.0)
    told = ledger.read()
    assert told[metrics.TOTAL_SECONDS] == pytest.approx(10)
    assert set(told) == {metrics.TOTAL_SECONDS, metrics.GOODPUT, *LOST_SECONDS}


def test_a_process_began_before_now() -> None:
    age = time.monotonic() - find_process_start()
    assert 0 < age < 3600 * 24
