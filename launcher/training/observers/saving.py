"""Saves what is trained: at every checkpoint that is due, and at the end the best or the last."""

from __future__ import annotations

import shutil
from contextlib import suppress

from launcher.checkpoints import Damaged, list_checkpoints, read_checkpoint, step_of
from launcher.errors import LauncherError, say
from launcher.training.background import Background
from launcher.training.checkpoint import Snapshot, take_snapshot, write_snapshot
from launcher.training.describing import CARD_FILE, write_card
from launcher.training.handing import hand_out
from launcher.training.observers.base import Observer
from launcher.training.observers.best import Best
from launcher.training.position import Position
from launcher.training.run import Run
from launcher.training.saved import read_exactly, save_trained, write_trained


class Saving(Observer):
    """States are copied to the host while all ranks wait; the first rank writes them beside the next steps."""

    def __init__(self, best: Best) -> None:
        self._best = best
        self._background = Background()

    def on_start(self, run: Run, step: int) -> None:  # noqa: ARG002
        """What a killed run was writing is of no use to anybody."""
        if run.engine.is_main and run.paths.checkpoints.is_dir():
            for folder in run.paths.checkpoints.glob(".step-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def on_save(self, run: Run, position: Position) -> None:
        self._settle(run)
        snapshot = take_snapshot(run, position, self._best.state)
        if snapshot is not None:
            best = self._best.step
            self._background.start(lambda: _write(run, snapshot, best))

    def on_end(self, run: Run, step: int) -> None:
        """The best checkpoint where the plan wants it, else the last weights."""
        self._settle(run)
        wanted = self._best.step if run.plan.schedule.load_best_model_at_end else None
        chosen = hand_out(run.engine.accelerator, _find_whole(run, wanted) or step)
        if chosen == step:
            save_trained(run, run.paths.adapter)
        if not run.engine.is_main:
            return
        if chosen != step:
            write_trained(run, read_exactly(run, run.paths.checkpoint(chosen)), run.paths.adapter)
        (run.paths.adapter / CARD_FILE).unlink(missing_ok=True)
        write_card(run.plan, run.paths, steps_done=step, saved_step=chosen)

    def close(self) -> None:
        """Behind a failure: what is being written is still written."""
        with suppress(Exception):  # another error is on its way
            self._background.wait()

    def _settle(self, run: Run) -> None:
        """The last one is on the disk, or the run ends here, unless it was told to go on without."""
        try:
            self._background.wait(lambda: run.pulse.beat("writing a checkpoint"))
        except LauncherError as error:
            if run.plan.guards.save_errors == "stop":
                raise
            say(f"warning: no checkpoint: {error}")


def _find_whole(run: Run, wanted: int | None) -> int | None:
    """The best one, if it is what was written; else it is told that the last one takes its place."""
    if wanted is None or not run.engine.is_main:
        return None
    found = read_checkpoint(run.paths.checkpoint(wanted))
    if isinstance(found, Damaged):
        say(f"warning: {found}; the last weights are saved instead of the best")
        return None
    return wanted


def _write(run: Run, snapshot: Snapshot, best: int | None) -> None:
    write_snapshot(run, snapshot)
    _delete_old(run, best, newest=snapshot.manifest.step)


def _delete_old(run: Run, best: int | None, newest: int) -> None:
    """After the new one is proven. It stays, and so does the best one, whatever its age."""
    limit = run.plan.schedule.save_total_limit
    kept = [step_of(folder) for folder in reversed(list_checkpoints(run.paths))]
    while limit is not None and len(kept) > limit:
        later = [step for step in kept if step > newest]  # damaged: the run was taken up behind an older one
        oldest = next((step for step in (*later, *kept) if step not in (best, newest)), None)
        if oldest is None:
            return
        kept.remove(oldest)
        folder = run.paths.checkpoint(oldest)
        with suppress(OSError):  # by another name first: half of it must not look like a checkpoint
            shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.deleting")))
