from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.training.observers.stop_on_signal import StopOnSignal
from launcher.training.runtime.startup_timer import StartupTimer
from launcher.training.trainer import _stop_before_training


def test_phases_add_up_to_the_time_since_the_start() -> None:
    timer = StartupTimer(time.monotonic() - 3.0)
    timer.end_phase("imports")
    timer.end_phase("data")
    assert 3.0 <= timer.seconds["imports"] < 4.0
    assert 0.0 <= timer.seconds["data"] < 1.0


def test_repeated_phase_is_summed_up() -> None:
    timer = StartupTimer(time.monotonic() - 2.0)
    timer.end_phase("model")
    first = timer.seconds["model"]
    timer.end_phase("model")
    assert list(timer.seconds) == ["model"]
    assert timer.seconds["model"] >= first


def test_description_has_the_total_and_no_empty_phase() -> None:
    timer = StartupTimer(0.0)
    timer.seconds = {"imports": 5.04, "data": 0.01, "model": 1.5}
    assert timer.describe() == "6.5 s: imports 5.0, model 1.5"


@pytest.mark.parametrize(("received", "num_ranks", "stops"), [(True, 1, True), (False, 1, False), (True, 2, False)])
def test_signal_during_start_up_stops_one_process_before_it_trains(received: bool, num_ranks: int, stops: bool) -> None:
    """Several ranks decide together, after a step."""
    stop, accelerator = StopOnSignal(), SimpleNamespace(num_processes=num_ranks)
    typed: Any = accelerator
    if received:
        stop._handle(signal.SIGTERM, None)
    if not stops:
        _stop_before_training(stop, typed)
        return
    with pytest.raises(KeyboardInterrupt, match="stopped before the first step of this start"):
        _stop_before_training(stop, typed)
