"""Writes metrics.jsonl: the facts of a run, a line a step and a line an evaluation."""

from __future__ import annotations

from launcher.errors import RunFailedError, say
from launcher.metrics import TRAIN_LOSS, StepMetrics, append_metrics
from launcher.training.observers.base import Observer
from launcher.training.run import Run


class Facts(Observer):
    def __init__(self) -> None:
        self.last_loss: float | None = None

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        self.last_loss = metrics.get(TRAIN_LOSS)
        if run.engine.is_main:
            _write(run, metrics)

    def on_evaluation(self, run: Run, metrics: StepMetrics) -> bool:
        if run.engine.is_main and metrics.values:
            _write(run, metrics)
        return False


def _write(run: Run, metrics: StepMetrics) -> None:
    try:
        append_metrics(run.paths.metrics, metrics)
    except OSError as error:
        if run.plan.guards.save_errors == "continue":
            say(f"warning: {run.paths.metrics} cannot be written: {error.strerror}")
            return
        what = f"{run.paths.metrics} cannot be written: {error.strerror}"
        raise RunFailedError(what, hint="is the disk full, or read-only?") from None
