"""When evaluation and saving are due."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.training.run import Run


def is_due(run: Run, step: int, every_steps: int | None, every_epochs: float | None) -> bool:
    """After step `step`, which counts from 1: by steps, by epochs, and after the last step if at all."""
    if every_steps is None and every_epochs is None:
        return False
    if step == run.num_steps:
        return True
    if every_steps is not None:
        return step % every_steps == 0
    assert every_epochs is not None
    return _whole(step, every_epochs * run.steps_per_epoch) > _whole(step - 1, every_epochs * run.steps_per_epoch)


def _whole(step: int, length: float) -> int:
    """How many lengths, which may be fractions of an epoch, lie before a step's end."""
    return int(step / length + 1e-9)
