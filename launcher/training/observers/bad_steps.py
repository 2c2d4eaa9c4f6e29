"""Steps whose loss or gradients are no numbers, and losses that jump: told with the rows that made them."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from launcher import metrics as names
from launcher.checkpoints import list_checkpoints
from launcher.errors import RunFailedError, say
from launcher.metrics import StepMetrics
from launcher.training.observers.base import Observer
from launcher.training.run import Run

_MAX_SHOWN = 24
_RECENT, _ENOUGH = 64, 16  # steps that a loss is compared with, and how few will do
_SPREADS, _SHARE = 8.0, 0.2  # a jump is above the median by so many median deviations, and by such a part of it


class BadSteps(Observer):
    """Every rank sees the same, so all of them end the run at the same step."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=_RECENT)

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        loss, norm = metrics.values[names.TRAIN_LOSS], metrics.values[names.GRAD_NORM]
        # Loss scaling finds its scale by steps that overflow: only a loss that is no number is bad there.
        is_bad = not math.isfinite(loss) or (metrics.values[names.SKIPPED] > 0 and not run.engine.scales_loss)
        self._in_a_row = self._in_a_row + 1 if is_bad else 0
        if is_bad:
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
            _tell(run, f"step {metrics.step:,}: {what}; the step was passed over. {_name_rows(run, metrics)}")
            if self._in_a_row > run.plan.guards.max_bad_steps:
                raise _came_apart(run, metrics, self._in_a_row)
            return
        if self._is_jump(loss):
            usual = median(self._losses)
            _tell(
                run,
                f"step {metrics.step:,}: the loss jumped from {usual:.4f} to {loss:.4f}. {_name_rows(run, metrics)}",
            )
        self._losses.append(loss)

    def _is_jump(self, loss: float) -> bool:
        if len(self._losses) < _ENOUGH:
            return False
        usual = median(self._losses)
        spread = median(abs(other - usual) for other in self._losses)
        return loss > usual + max(_SPREADS * spread, _SHARE * usual)


def _came_apart(run: Run, metrics: StepMetrics, in_a_row: int) -> RunFailedError:
    saved = list_checkpoints(run.paths)
    last = f"the last checkpoint is {saved[0]}" if saved else "no checkpoint was saved before"
    return RunFailedError(
        f"the training came apart: {in_a_row} steps in a row up to step {metrics.step:,} had losses or gradients that "
        f"are no numbers; {last}",
        hint="a lower learning_rate or a longer warm-up usually helps; `launcher prepare` shows whether rows are odd",
    )


def _name_rows(run: Run, metrics: StepMetrics) -> str:
    """As line numbers of the data, which is how a person finds them."""
    rows = sorted({int(row) for pack in metrics.packs for row in run.train.file[pack].rows})
    shown = ", ".join(map(str, rows[:_MAX_SHOWN])) + (f" and {len(rows) - _MAX_SHOWN} more" * (len(rows) > _MAX_SHOWN))
    return f"Its rows: {shown}"


def _tell(run: Run, text: str) -> None:
    if run.engine.is_main:
        say(f"warning: {text}")
