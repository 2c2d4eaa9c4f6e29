"""Track the best evaluation by validation loss, and stop early when it no longer improves."""

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
        self._plan = plan
        self._worse_in_a_row = 0

    @property
    def state(self) -> BestState:
        """The state to save in a checkpoint."""
        return BestState(step=self.step, value=self.value, worse_in_a_row=self._worse_in_a_row)

    def restore(self, state: BestState) -> None:
        """Load the state of a checkpoint."""
        self.step, self.value, self._worse_in_a_row = state.step, state.value, state.worse_in_a_row

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:  # noqa: ARG002
        """Request a checkpoint of a new best step if the run is to end with it."""
        value = metrics.get(names.EVAL_LOSS)
        if value is None:
            return False
        has_improved = self._is_better(value, by=self._plan.early_stopping_threshold)
        self._worse_in_a_row = 0 if has_improved else self._worse_in_a_row + 1
        if not self._is_better(value, by=0.0):
            return False
        self.step, self.value = metrics.step, value
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
        return f"stopped early: no improvement on step {self.step} in {self._worse_in_a_row} evaluations"

    def _is_better(self, value: float, by: float) -> bool:
        if self.value is None or math.isnan(value):  # a NaN as best value would never be beaten
            return not math.isnan(value)
        return value < self.value - by
