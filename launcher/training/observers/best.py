"""The best evaluation so far, by its held-out loss, and stopping early where no better one comes."""

from __future__ import annotations

import math

from launcher import metrics as names
from launcher.checkpoints import BestState
from launcher.metrics import StepMetrics
from launcher.plan.model import SchedulePlan
from launcher.training.observers.base import Observer
from launcher.training.run import Run


class Best(Observer):
    def __init__(self, plan: SchedulePlan) -> None:
        self.step: int | None = None
        self.value: float | None = None
        self._plan = plan
        self._worse_in_a_row = 0

    @property
    def state(self) -> BestState:
        return BestState(step=self.step, value=self.value, worse_in_a_row=self._worse_in_a_row)

    def restore(self, state: BestState) -> None:
        self.step, self.value, self._worse_in_a_row = state.step, state.value, state.worse_in_a_row

    def on_evaluation(self, run: Run, metrics: StepMetrics) -> bool:  # noqa: ARG002
        """A new best is saved even where no checkpoint is due, if the run shall end with it."""
        value = metrics.get(names.EVAL_LOSS)
        if value is None:
            return False
        enough = self._is_better(value, by=self._plan.early_stopping_threshold)
        self._worse_in_a_row = 0 if enough else self._worse_in_a_row + 1
        if not self._is_better(value, by=0.0):
            return False
        self.step, self.value = metrics.step, value
        return self._plan.load_best_model_at_end

    def wants_to_stop(self) -> bool:
        patience = self._plan.early_stopping_patience
        return patience is not None and self._worse_in_a_row >= patience

    @property
    def stopped_early(self) -> str:
        """Why, in words; empty where it did not."""
        if not self.wants_to_stop():
            return ""
        return f"stopped early: {self._worse_in_a_row} evaluations in a row were no better than step {self.step}"

    def _is_better(self, value: float, by: float) -> bool:
        if self.value is None or math.isnan(value):  # not-a-number would never be beaten
            return not math.isnan(value)
        return value < self.value - by
