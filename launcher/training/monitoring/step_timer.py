"""Measure the time of steps, and how long the device idles for lack of data, by CUDA events without host syncs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_Timestamp = float | torch.cuda.Event


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """Times of one step; calling them waits until the step is done."""

    seconds: Callable[[], float]
    data_seconds: float  # the host waited for data
    starved_seconds: Callable[[], float]  # of these, the device was idle too, with no queued work left


class StepTimer:
    """Measures from the end of one step to the end of the next, including idle time."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Restart after an evaluation or a checkpoint, which do not belong to a step."""
        self._last = self._now()
        self._data_seconds = 0.0
        self._waits: list[tuple[_Timestamp, _Timestamp]] = []

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Measure a wait for data on the host, and with two CUDA events how long the device was idle meanwhile."""
        began, before = time.perf_counter(), self._now()
        yield
        self._data_seconds += time.perf_counter() - began
        self._waits.append((before, self._now()))

    def finish_step(self) -> StepTiming:
        """Return the timing of the step that ends here."""
        begin, end, waits = self._last, self._now(), self._waits
        data_seconds = self._data_seconds
        self._last, self._data_seconds, self._waits = end, 0.0, []
        return StepTiming(
            seconds=lambda: _elapsed(begin, end),
            data_seconds=data_seconds,
            starved_seconds=lambda: sum(_elapsed(*wait) for wait in waits),
        )

    def _now(self) -> _Timestamp:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed(begin: _Timestamp, end: _Timestamp) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0
