"""Treat repeated allocator retries as out of memory: training is slow, and the next allocation may fail."""

from __future__ import annotations

from collections import deque

import torch

from launcher.core.metrics import ALLOC_RETRIES, StepMetrics
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.base import Observer

_RECENT_STEPS, _MAX_WITH_RETRIES = 8, 4


class MemoryPressure(Observer):
    """Raises torch.OutOfMemoryError if many recent steps had allocator retries, which empty the allocator's cache."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._recent: deque[bool] = deque(maxlen=_RECENT_STEPS)

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Raise torch.OutOfMemoryError if too many recent steps had allocator retries."""
        retries = metrics.get(ALLOC_RETRIES)
        if retries is None:
            return
        self._recent.append(self._before is not None and retries > self._before)
        self._before = retries
        # Without a fallback, a slow training is better than a failed one.
        if sum(self._recent) >= _MAX_WITH_RETRIES and run.plan.oom_fallbacks:
            raise torch.OutOfMemoryError(
                f"{sum(self._recent)} of the last {len(self._recent)} steps had to empty the allocator's cache"
            )
