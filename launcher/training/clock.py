"""How long a step takes on the device, and how long the device had nothing to do, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_Moment = float | torch.cuda.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """One step. Reading its seconds waits until it is done."""

    seconds: Callable[[], float]
    data_seconds: float  # in which the host waited for data
    starved_seconds: Callable[[], float]  # of these, what the device waited too: before, it had work that was queued


class StepClock:
    """From the end of one step to the end of the next: what the device waited in between is counted too."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """After whatever is no step: evaluation, saving."""
        self._last = self._now()
        self._data_seconds = 0.0
        self._waits: list[tuple[_Moment, _Moment]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For data. Of two events in the device's queue with nothing between them, the second is late by as long as the
        device had nothing to do."""
        began, before = time.perf_counter(), self._now()
        yield
        self._data_seconds += time.perf_counter() - began
        self._waits.append((before, self._now()))

    def lap(self) -> Lap:
        begin, end, waits = self._last, self._now(), self._waits
        data_seconds = self._data_seconds
        self._last, self._data_seconds, self._waits = end, 0.0, []
        return Lap(
            seconds=lambda: _between(begin, end),
            data_seconds=data_seconds,
            starved_seconds=lambda: sum(_between(*wait) for wait in waits),
        )

    def _now(self) -> _Moment:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: _Moment, end: _Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0
