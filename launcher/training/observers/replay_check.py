"""Compare steps that are trained again after a resume with what was recorded before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.core import metrics as names
from launcher.core.errors import RunFailedError
from launcher.core.log import get_logger
from launcher.core.metrics import StepMetrics
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.base import Observer

log = get_logger(__name__)

# Largest relative difference of losses: GPU kernels add in any order, which 16-bit arithmetic makes visible.
_MAX_EXACT, _MAX_INEXACT = 1e-5, 2e-2


class ReplayCheck(Observer):
    """Compares steps with their recorded metrics on rank 0; warns about differences, or ends the run (`must_agree`)."""

    def __init__(self, recorded: Sequence[StepMetrics], *, must_agree: bool) -> None:
        self._recorded = {row.step: row for row in recorded if names.TRAIN_LOSS in row.values}
        self._last = max(self._recorded, default=0)
        self._first = min(self._recorded, default=0)
        self._must_agree = must_agree
        self._largest = 0.0
        self._differs = False

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Compare the packs and the loss of a step with those recorded when it was first trained."""
        before = self._recorded.pop(metrics.step, None)
        if before is None:
            return
        if before.packs != metrics.packs:
            self._report(f"step {metrics.step} trained packs {before.packs} before, and {metrics.packs} now")
        loss, again = before.values[names.TRAIN_LOSS], metrics.values[names.TRAIN_LOSS]
        if not (math.isfinite(loss) or math.isfinite(again)):
            difference = 0.0  # skipped both times
        else:
            difference = abs(again - loss) / max(abs(loss), 1e-9)
        self._largest = max(self._largest, difference)
        is_exact = run.engine.device.type == "cpu" and run.plan.precision.compute_dtype == "fp32"
        if not difference <= (_MAX_EXACT if is_exact else _MAX_INEXACT):
            self._report(f"the loss of step {metrics.step} was {loss:.6f}, and is {again:.6f} now")
        if metrics.step == self._last and not self._differs:
            losses = f"losses differ by at most {self._largest:.1e} (relative)" if self._largest else "same losses"
            steps = f"steps {self._first:,} to {self._last:,}"
            log.info(f"{steps} match the recorded steps: same packed sequences, {losses}")

    def _report(self, difference: str) -> None:
        self._differs = True
        what = f"replayed steps differ from the recorded ones: {difference}"
        if self._must_agree:
            raise RunFailedError(what, hint="resume without --verify to continue anyway")
        log.warning(what)
