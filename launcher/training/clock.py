"""How long a step takes on the device, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Seconds = Callable[[], float]  # reading it waits until the step is done


class StepClock:
    """From the end of one step to the end of the next: what the device waited in between is counted too."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """After whatever is no step: evaluation, saving."""
        self._last = self._now()

    def lap(self) -> Seconds:
        begin, end = self._last, self._now()
        self._last = end
        return lambda: _between(begin, end)

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0
