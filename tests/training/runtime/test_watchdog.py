"""Tests of the heartbeat that the watchdog reads."""

from __future__ import annotations

import threading

import pytest

from launcher.training.runtime import watchdog
from launcher.training.runtime.watchdog import Activity, Heartbeat


def test_heartbeat_continues_during_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_BEAT_SECONDS", 0.01)
    beats, three_times = [], threading.Event()

    class Recorded(Heartbeat):
        def beat(self, activity: Activity, step: int | None = None) -> None:
            super().beat(activity, step)
            beats.append(activity)
            if len(beats) == 3:
                three_times.set()

    heartbeat = Recorded()
    with heartbeat.beating("evaluating"):
        assert three_times.wait(60)
    assert set(beats) == {"evaluating"}
    ended = len(beats)
    assert not threading.Event().wait(0.1)
    assert len(beats) == ended, "no further beats"
