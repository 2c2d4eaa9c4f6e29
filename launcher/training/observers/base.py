"""The interface of observers, the callbacks of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.core.metrics import StepMetrics

if TYPE_CHECKING:
    from launcher.training.checkpoint.progress import TrainProgress
    from launcher.training.engine.run import TrainingRun


class Observer:
    """A callback of the training loop; every method does nothing by default."""

    def on_start(self, run: TrainingRun, step: int) -> None:
        """Handle the start of training, after `step` steps completed earlier."""

    def before_step(self, run: TrainingRun, step: int) -> None:
        """Handle a step that is about to be queued; the device may still execute the one before."""

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Handle the metrics of a step; called one step late."""

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:  # noqa: ARG002
        """Handle an evaluation, without values if there is no validation split; return True to request a checkpoint."""
        return False

    def on_save(self, run: TrainingRun, progress: TrainProgress) -> None:
        """Save a checkpoint."""

    def on_end(self, run: TrainingRun, step: int) -> None:
        """Handle the end of training after `step` steps."""

    def should_stop(self) -> bool:
        """Whether to stop, for a reason that all ranks see, such as the validation loss."""
        return False

    def stop_requested(self) -> bool:
        """Whether this rank wants to stop, for example after a signal; all ranks agree before any of them stops."""
        return False


class Observers(Observer):
    """An observer that passes each call on to several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_start(self, run: TrainingRun, step: int) -> None:
        """Call all observers."""
        for observer in self._observers:
            observer.on_start(run, step)

    def before_step(self, run: TrainingRun, step: int) -> None:
        """Call all observers."""
        for observer in self._observers:
            observer.before_step(run, step)

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Call all observers."""
        for observer in self._observers:
            observer.on_step(run, metrics)

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:
        """Call all observers, and return whether any requests a checkpoint."""
        requests = [observer.on_evaluation(run, metrics) for observer in self._observers]  # calls all of them
        return any(requests)

    def on_save(self, run: TrainingRun, progress: TrainProgress) -> None:
        """Call all observers."""
        for observer in self._observers:
            observer.on_save(run, progress)

    def on_end(self, run: TrainingRun, step: int) -> None:
        """Call all observers, and then raise the first error, so that the weights are saved in any case."""
        errors = []
        for observer in self._observers:
            try:
                observer.on_end(run, step)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def should_stop(self) -> bool:
        """Return whether any observer wants to stop, for a reason that is equal on all ranks."""
        return any(observer.should_stop() for observer in self._observers)

    def stop_requested(self) -> bool:
        """Return whether any observer of this rank wants to stop."""
        return any(observer.stop_requested() for observer in self._observers)
