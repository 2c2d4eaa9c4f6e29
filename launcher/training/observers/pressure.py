"""Allocations that succeed only after the cache was emptied: training crawls, and the next one may fail."""

from __future__ import annotations

from collections import deque

import torch

from launcher.metrics import ALLOC_RETRIES, StepMetrics
from launcher.training.observers.base import Observer
from launcher.training.run import Run

_RECENT, _STORM = 8, 4  # steps that are looked at, and how many of them with retries are a storm


class Pressure(Observer):
    """A storm counts as out of memory."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._recent: deque[bool] = deque(maxlen=_RECENT)

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        retries = metrics.get(ALLOC_RETRIES)
        if retries is None:
            return
        self._recent.append(self._before is not None and retries > self._before)
        self._before = retries
        if sum(self._recent) >= _STORM and run.plan.ladder:  # without a rung, slow is better than not at all
            raise torch.OutOfMemoryError(
                f"{sum(self._recent)} of the last {len(self._recent)} steps had to empty the cache to get memory"
            )
