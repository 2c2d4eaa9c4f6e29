"""Signals: one wish to stop, however many processes pass it on; a second one, later, means at once."""

from __future__ import annotations

import signal

import pytest

from launcher.training.guards import StopOnSignal

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


def tell(stop: StopOnSignal, signals: list[tuple[float, signal.Signals]], monkeypatch: pytest.MonkeyPatch) -> None:
    for when, number in signals:
        monkeypatch.setattr("launcher.training.guards.time.monotonic", lambda when=when: when)
        stop._handle(number, None)


@pytest.mark.parametrize(
    "signals",
    [
        [(10.0, TERM)],
        [(10.0, TERM), (10.1, USR1), (10.2, TERM)],  # a scheduler to all, our launcher, an agent
        [(10.0, USR1), (60.0, USR1)],  # Slurm warns twice
        [(10.0, INT), (11.5, TERM)],
    ],
)
def test_one_wish(signals: list[tuple[float, signal.Signals]], monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopOnSignal()
    assert not stop.asks_to_stop()
    tell(stop, signals, monkeypatch)
    assert stop.asks_to_stop()
    assert stop.received == signals[0][1]


@pytest.mark.parametrize("second", [TERM, INT])
def test_a_second_wish(second: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopOnSignal()
    with pytest.raises(KeyboardInterrupt):
        tell(stop, [(10.0, USR1), (13.0, second)], monkeypatch)
