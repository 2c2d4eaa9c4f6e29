"""Signals that arrive together are one stop request; a later one stops immediately."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.training.observers.stop_on_signal import StopOnSignal
from launcher.training.trainer import _stop_before_training

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


def tell(stop: StopOnSignal, signals: list[tuple[float, signal.Signals]], monkeypatch: pytest.MonkeyPatch) -> None:
    for when, number in signals:
        monkeypatch.setattr("launcher.training.observers.stop_on_signal.time.monotonic", lambda when=when: when)
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
def test_signals_together_are_one_request(
    signals: list[tuple[float, signal.Signals]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopOnSignal()
    assert not stop.stop_requested()
    tell(stop, signals, monkeypatch)
    assert stop.stop_requested()
    assert stop.received == signals[0][1]


@pytest.mark.parametrize("second", [TERM, INT])
def test_a_later_signal_stops_immediately(second: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopOnSignal()
    with pytest.raises(KeyboardInterrupt):
        tell(stop, [(10.0, USR1), (13.0, second)], monkeypatch)


@pytest.mark.parametrize("hook", ["on_save", "on_end"])
def test_sigterm_of_torchrun_does_not_interrupt_the_end_of_a_run(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, unused = StopOnSignal(), Mock()
    tell(stop, [(10.0, USR1)], monkeypatch)
    getattr(stop, hook)(unused, unused)
    tell(stop, [(13.0, TERM)], monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        tell(stop, [(14.0, INT)], monkeypatch)


def test_a_save_without_a_stop_request_protects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, unused = StopOnSignal(), Mock()
    stop.on_save(unused, unused)
    with pytest.raises(KeyboardInterrupt):
        tell(stop, [(10.0, TERM), (13.0, TERM)], monkeypatch)


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
    with pytest.raises(KeyboardInterrupt, match="stopped before the first step after this start"):
        _stop_before_training(stop, typed)
