"""What an observer may see. Every method does nothing here, so that each observer writes only what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.metrics import StepMetrics

if TYPE_CHECKING:
    from launcher.training.position import Position
    from launcher.training.run import Run


class Observer:
    def on_start(self, run: Run, step: int) -> None:
        """Before the first step that is trained here; `step` are done already."""

    def before_step(self, run: Run, step: int) -> None:
        """When a step is about to be queued; the device may still be busy with the one before."""

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """After every step, one step late."""

    def on_evaluation(self, run: Run, metrics: StepMetrics) -> bool:  # noqa: ARG002
        """After every evaluation; True asks for a checkpoint at this step. No values: there is no validation split."""
        return False

    def on_save(self, run: Run, position: Position) -> None:
        """When a checkpoint is due."""

    def on_end(self, run: Run, step: int) -> None:
        """After the last step that was trained."""

    def wants_to_stop(self) -> bool:
        """For reasons that all ranks see alike, such as a held-out loss."""
        return False

    def asks_to_stop(self) -> bool:
        """For a reason that only this rank may know, such as a signal: all ranks agree before any of them stops."""
        return False


class Observers(Observer):
    """Several, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_start(self, run: Run, step: int) -> None:
        for observer in self._observers:
            observer.on_start(run, step)

    def before_step(self, run: Run, step: int) -> None:
        for observer in self._observers:
            observer.before_step(run, step)

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        for observer in self._observers:
            observer.on_step(run, metrics)

    def on_evaluation(self, run: Run, metrics: StepMetrics) -> bool:
        answers = [observer.on_evaluation(run, metrics) for observer in self._observers]  # all of them are asked
        return any(answers)

    def on_save(self, run: Run, position: Position) -> None:
        for observer in self._observers:
            observer.on_save(run, position)

    def on_end(self, run: Run, step: int) -> None:
        for observer in self._observers:
            observer.on_end(run, step)

    def wants_to_stop(self) -> bool:
        return any(observer.wants_to_stop() for observer in self._observers)

    def asks_to_stop(self) -> bool:
        return any(observer.asks_to_stop() for observer in self._observers)
