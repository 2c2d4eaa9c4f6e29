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

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Write a line per step."""
        self.last_step, self.last_loss = metrics.step, metrics.get(TRAIN_LOSS)
        if run.engine.is_main:
            _write(run, metrics)

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:
        """Write a line per evaluation."""
        if run.engine.is_main and metrics.values:
            _write(run, metrics)
        return False


def _write(run: TrainingRun, metrics: StepMetrics) -> None:
    try:
        append_metrics(run.paths.metrics, metrics)
    except OSError as error:
        what = f"{run.paths.metrics} cannot be written: {error.strerror}"
        if run.plan.guards.save_errors == "stop":
            raise RunFailedError(what, hint=hint_for(error)) from None
        log.warning(what)
