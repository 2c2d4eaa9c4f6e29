"""Steps that are trained a second time, because a run was taken up behind an older checkpoint, against the record."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher import metrics as names
from launcher.errors import RunFailedError, say
from launcher.metrics import StepMetrics
from launcher.training.observers.base import Observer
from launcher.training.run import Run

# Relative difference of losses. Kernels of a GPU add in any order, and 16 bits show it.
_EXACT, _NEAR = 1e-5, 2e-2


class Replay(Observer):
    """`must_agree`: a difference ends the run; else it is only told. On the first rank; the others have no record."""

    def __init__(self, recorded: Sequence[StepMetrics], *, must_agree: bool) -> None:
        self._recorded = {row.step: row for row in recorded if names.TRAIN_LOSS in row.values}
        self._last = max(self._recorded, default=0)
        self._first = min(self._recorded, default=0)
        self._must_agree = must_agree
        self._largest = 0.0

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        before = self._recorded.pop(metrics.step, None)
        if before is None:
            return
        if before.packs != metrics.packs:
            self._tell(f"step {metrics.step} trained packs {before.packs} before, and {metrics.packs} now")
        loss, again = before.values[names.TRAIN_LOSS], metrics.values[names.TRAIN_LOSS]
        if not (math.isfinite(loss) or math.isfinite(again)):
            difference = 0.0  # passed over both times
        else:
            difference = abs(again - loss) / max(abs(loss), 1e-9)
        self._largest = max(self._largest, difference)
        is_exact = run.engine.device.type == "cpu" and run.plan.precision.compute_dtype == "fp32"
        if not difference <= (_EXACT if is_exact else _NEAR):
            self._tell(f"the loss of step {metrics.step} was {loss:.6f}, and is {again:.6f} now")
        if metrics.step == self._last:
            told = "" if self._largest == 0 else f", losses differ by {self._largest:.1e} at most (relative)"
            same = f"steps {self._first:,} to {self._last:,} came as they were recorded: same packs, "
            say(same + ("same losses" if not told else told[2:]))

    def _tell(self, what: str) -> None:
        if self._must_agree:
            raise RunFailedError(f"the training does not repeat itself: {what}", hint="resume without --verify goes on")
        say(f"warning: the training does not repeat itself: {what}")
