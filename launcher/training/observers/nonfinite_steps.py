"""Report steps with non-finite loss or gradients and loss spikes, with their rows; abort if training diverges."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from launcher.core import metrics as names
from launcher.core.errors import RunFailedError
from launcher.core.metrics import SPIKE_WINDOW, StepMetrics, is_loss_spike
from launcher.runs.checkpoints import list_checkpoints
from launcher.training.engine.run import TrainingRun
from launcher.training.observers.base import Observer

_MAX_SHOWN = 24


class NonfiniteSteps(Observer):
    """Aborts after too many non-finite steps in a row, on all ranks at the same step."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Report a skipped step or a loss spike; raise if training diverged."""
        loss, norm = metrics.values[names.TRAIN_LOSS], metrics.values[names.GRAD_NORM]
        # Loss scaling finds its scale by steps that overflow, so only a non-finite loss counts there.
        is_nonfinite = not math.isfinite(loss) or (
            metrics.values[names.SKIPPED] > 0 and not run.engine.uses_loss_scaling
        )
        self._in_a_row = self._in_a_row + 1 if is_nonfinite else 0
        if is_nonfinite:
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
            run.warn(f"step {metrics.step:,}: {what}; step skipped. {_format_rows(run, metrics)}")
            if self._in_a_row > run.plan.guards.max_nonfinite_steps:
                raise _diverged(run, metrics, self._in_a_row)
            return
        if is_loss_spike(loss, self._losses):
            usual = median(self._losses)
            run.warn(f"step {metrics.step:,}: loss spike from {usual:.4f} to {loss:.4f}. {_format_rows(run, metrics)}")
        self._losses.append(loss)


def _diverged(run: TrainingRun, metrics: StepMetrics, in_a_row: int) -> RunFailedError:
    saved = list_checkpoints(run.paths)
    last = f"the last checkpoint is {saved[0]}" if saved else "no checkpoint was saved before"
    return RunFailedError(
        f"training diverged: non-finite loss or gradients in {in_a_row} consecutive steps (last: {metrics.step:,}); "
        f"{last}",
        hint="a lower learning_rate or a longer warm-up usually helps; `launcher prepare` shows unusual rows",
    )


def _format_rows(run: TrainingRun, metrics: StepMetrics) -> str:
    """List the rows of a step by their line numbers in the data."""
    rows = sorted({int(row) for pack in metrics.packs for row in run.train.file[pack].rows})
    more = f" and {len(rows) - _MAX_SHOWN} more" if len(rows) > _MAX_SHOWN else ""
    return f"Its rows: {', '.join(map(str, rows[:_MAX_SHOWN]))}{more}"
