"""Writes metrics.jsonl: the facts of a run, a line a step and a line an evaluation."""

from __future__ import annotations

from launcher.metrics import StepMetrics, append_metrics
from launcher.training.observers.base import Observer
from launcher.training.run import Run


class Facts(Observer):
    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        if run.engine.is_main:
            append_metrics(run.paths.metrics, metrics)

    def on_evaluation(self, run: Run, metrics: StepMetrics) -> bool:
        if run.engine.is_main and metrics.values:
            append_metrics(run.paths.metrics, metrics)
        return False
