"""Write metrics.jsonl: one line per step and one per evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.core.errors import RunFailedError, hint_for
from launcher.core.log import get_logger
from launcher.core.metrics import TRAIN_LOSS, StepMetrics, append_metrics, find_values
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.base import Observer

log = get_logger(__name__)


class MetricsWriter(Observer):
    """Writes metrics on rank 0, and remembers the last step and its loss on all ranks.

    `step` steps were completed by earlier attempts, whose metrics are `rows`.
    """

    def __init__(self, step: int = 0, rows: Sequence[StepMetrics] = ()) -> None:
        losses = find_values(rows, TRAIN_LOSS)
        self.last_step = step
        self.last_loss = losses[-1] if losses else None
        self._failure: RunFailedError | None = None  # of the last step, raised when the weights are saved

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Write a line per step."""
        self.last_step, self.last_loss = metrics.step, metrics.get(TRAIN_LOSS)
        if run.engine.is_main:
            self._write(run, metrics)

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:
        """Write a line per evaluation."""
        if run.engine.is_main and metrics.values:
            self._write(run, metrics)
        return False

    def on_end(self, run: TrainingRun, step: int) -> None:  # noqa: ARG002
        """Raise the error of the last step's metrics; the other observers are called all the same."""
        if self._failure is not None:
            raise self._failure

    def _write(self, run: TrainingRun, metrics: StepMetrics) -> None:
        try:
            append_metrics(run.paths.metrics, metrics)
        except OSError as error:
            what = f"{run.paths.metrics} cannot be written: {error.strerror}"
            if run.plan.guards.save_errors != "stop":
                log.warning(what)
                return
            failure = RunFailedError(what, hint=hint_for(error))
            if metrics.step < run.num_steps:
                raise failure from None
            self._failure = failure
