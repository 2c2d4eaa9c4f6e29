"""Saves what is trained: at every checkpoint that is due, and at the end the best or the last."""

from __future__ import annotations

import shutil
from pathlib import Path

from launcher.training.describing import CARD_FILE, write_card
from launcher.training.observers.base import Observer
from launcher.training.observers.best import Best
from launcher.training.run import Run
from launcher.training.saved import save_trained


class Saving(Observer):
    def __init__(self, best: Best) -> None:
        self._best = best
        self._kept: list[int] = []

    def on_save(self, run: Run, step: int) -> None:
        save_trained(run, run.paths.checkpoint(step))
        self._kept.append(step)
        if run.engine.is_main:
            (run.paths.checkpoint(step) / CARD_FILE).unlink(missing_ok=True)  # PEFT's form, to be filled in
        self._delete_old(run)

    def on_end(self, run: Run, step: int) -> None:
        """The best checkpoint where the plan wants it, else the last weights."""
        best = self._best.step if run.plan.schedule.load_best_model_at_end else None
        chosen = best if best is not None and best in self._kept else step
        if chosen == step:
            save_trained(run, run.paths.adapter)
        if not run.engine.is_main:
            return
        if chosen != step:
            _copy(run.paths.checkpoint(chosen), run.paths.adapter)
        (run.paths.adapter / CARD_FILE).unlink(missing_ok=True)
        write_card(run.plan, run.paths, steps_done=step, saved_step=chosen)

    def _delete_old(self, run: Run) -> None:
        """After the new one is there; the best one stays whatever its age."""
        limit = run.plan.schedule.save_total_limit
        while limit is not None and len(self._kept) > limit:
            oldest = next((kept for kept in self._kept[:-1] if kept != self._best.step), None)
            if oldest is None:
                return
            self._kept.remove(oldest)
            if run.engine.is_main:
                shutil.rmtree(run.paths.checkpoint(oldest), ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    scratch = target.with_name(f".{target.name}.making")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    scratch.rename(target)
