from __future__ import annotations

import time

from launcher.training.runtime.startup_timer import StartupTimer


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
