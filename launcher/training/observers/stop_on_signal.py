"""Stop a training after the current step when a signal arrives."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import TYPE_CHECKING

from launcher.training.observers.base import Observer

if TYPE_CHECKING:
    from launcher.training.checkpoint.progress import TrainProgress
    from launcher.training.engine.run import TrainingRun

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A scheduler signals every process of a job, including the parents that forward the signal to us. Signals that arrive
# together count as one request.
_TOGETHER_SECONDS = 2.0


class StopOnSignal(Observer):
    """Stops the training on a signal: after the current step, or at once on a second signal.

    While the last checkpoint is saved and the result is recorded, SIGTERM is ignored: torchrun sends it to all ranks as
    soon as one of them has exited.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._is_ending = False

    def install(self) -> None:
        """Install the signal handlers."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def stop_requested(self) -> bool:
        """Whether a signal arrived."""
        return self.received is not None

    def on_save(self, run: TrainingRun, progress: TrainProgress) -> None:  # noqa: ARG002
        """Ignore SIGTERM while the last checkpoint is saved, if a signal has requested the stop."""
        self._is_ending = self.stop_requested()

    def on_end(self, run: TrainingRun, step: int) -> None:  # noqa: ARG002
        """Ignore SIGTERM while the result is recorded."""
        self._is_ending = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
        elif number == signal.SIGTERM and self._is_ending:
            return
        elif number != signal.SIGUSR1 and time.monotonic() - self._received_at > _TOGETHER_SECONDS:
            raise KeyboardInterrupt
