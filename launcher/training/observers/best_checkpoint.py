"""Track the best evaluation by validation loss or by judged answers, and stop early when it no longer improves."""

from __future__ import annotations

import math

from launcher.core import metrics as names
from launcher.core.metrics import StepMetrics
from launcher.plan.model import SchedulePlan
from launcher.runs.checkpoints import BestState
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.base import Observer


class BestCheckpoint(Observer):
    """The best step so far, and early stopping."""

    def __init__(self, plan: SchedulePlan) -> None:
        self.step: int | None = None
        self.value: float | None = None
        self._loss: float | None = None
        self._plan = plan
        self._worse_in_a_row = 0

    @property
    def state(self) -> BestState:
        """The state to save in a checkpoint."""
        return BestState(
            step=self.step,
            value=self.value,
            worse_in_a_row=self._worse_in_a_row,
            metric=self._plan.metric_for_best_model,
            loss=self._loss,
        )

    def restore(self, state: BestState) -> None:
        """Load the state from a checkpoint, unless that run chose its best step by another metric."""
        if state.metric != self._plan.metric_for_best_model:
            return
        self.step, self.value, self._loss = state.step, state.value, state.loss
        self._worse_in_a_row = state.worse_in_a_row

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:  # noqa: ARG002
        """Return whether to save a checkpoint: after a new best step, but not step 0, if load_best_model_at_end."""
        value, loss = metrics.get(self._plan.metric_for_best_model), metrics.get(names.EVAL_LOSS)
        if value is None or metrics.step == 0:
            return False
        has_improved = self._is_better(value, by=self._plan.early_stopping_threshold)
        self._worse_in_a_row = 0 if has_improved else self._worse_in_a_row + 1
        is_lower_loss = loss is not None and self._loss is not None and loss < self._loss
        if not self._is_better(value, by=0.0) and not (value == self.value and is_lower_loss):
            return False
        self.step, self.value, self._loss = metrics.step, value, loss
        return self._plan.load_best_model_at_end

    def should_stop(self) -> bool:
        """Whether early_stopping_patience is exhausted."""
        patience = self._plan.early_stopping_patience
        return patience is not None and self._worse_in_a_row >= patience

    @property
    def stop_reason(self) -> str:
        """Why the run stopped early; empty if it did not."""
        if not self.should_stop():
            return ""
        metric = self._plan.metric_for_best_model
        which = "" if metric == names.EVAL_LOSS else f" of {metric}"
        return f"stopped early: no improvement{which} on step {self.step} in {self._worse_in_a_row} evaluations"

    def _is_better(self, value: float, by: float) -> bool:
        if self.value is None or math.isnan(value):  # a NaN as best value would never be beaten
            return not math.isnan(value)
        if self._plan.metric_for_best_model == names.EVAL_LOSS:
            return value < self.value - by
        return value > self.value + by
