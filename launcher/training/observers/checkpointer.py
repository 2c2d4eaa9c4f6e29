"""Save checkpoints when they are due, and at the end the best or the last weights."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import LauncherError
from launcher.core.log import get_logger
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.request.request import base_folders
from launcher.runs.checkpoints import Checkpoint, Damaged, list_checkpoints, read_checkpoint, step_of
from launcher.training.checkpoint.progress import TrainProgress
from launcher.training.checkpoint.shards import check_shared
from launcher.training.checkpoint.snapshot import Snapshot, take_snapshot, write_sharded, write_snapshot
from launcher.training.checkpoint.weights import read_exact_weights, save_weights, write_weights
from launcher.training.engine.collectives import broadcast_object
from launcher.training.engine.run import TrainingRun
from launcher.training.export.model_card import write_card
from launcher.training.observers.base import Observer
from launcher.training.observers.best_checkpoint import BestCheckpoint

log = get_logger(__name__)


class BackgroundWriter:
    """A thread that runs one write at a time; an error is raised by the next `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Wait for the previous write, then run `write` in a thread."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, beat: Callable[[], None] = lambda: None) -> None:
        """Wait for the write to finish, calling `beat` every second to show that the process is alive."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(1.0)
                beat()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error


class Checkpointer(Observer):
    """Saves checkpoints: copies states to the host while all ranks wait; rank 0 writes them during the next steps."""

    def __init__(self, best: BestCheckpoint) -> None:
        self._best = best
        self._writer = BackgroundWriter()
        self._failure: Exception | None = None  # of a checkpoint, raised after the weights are saved

    def on_start(self, run: TrainingRun, step: int) -> None:  # noqa: ARG002
        """Delete incomplete checkpoints of a killed run, and check that ranks that write shards share a folder."""
        if run.engine.is_main and run.paths.checkpoints.is_dir():
            for folder in run.paths.checkpoints.glob(".step-*"):
                shutil.rmtree(folder, ignore_errors=True)
        if run.plan.shards_checkpoints and not run.engine.is_deepspeed:
            check_shared(run.engine, run.paths.checkpoints)

    def on_save(self, run: TrainingRun, progress: TrainProgress) -> None:
        """Copy the state to the host and start writing it."""
        is_last = progress.step >= run.num_steps or self._best.should_stop()
        if run.plan.shards_checkpoints:
            self._guard(run, lambda: self._save_sharded(run, progress), is_last=is_last)
            return
        self._finish_write(run, is_last=is_last)
        snapshot = take_snapshot(run, progress, self._best.state)
        if snapshot is not None:
            best = self._best.step
            self._writer.start(lambda: _write(run, snapshot, best))

    def _save_sharded(self, run: TrainingRun, progress: TrainProgress) -> None:
        with run.heartbeat.beating("writing a checkpoint"):
            write_sharded(run, progress, self._best.state)
        if run.engine.is_main:
            _delete_old(run, self._best.step, newest=progress.step)

    def on_end(self, run: TrainingRun, step: int) -> None:
        """Save the best checkpoint's weights if the plan says so, else the last weights.

        The error of a failed checkpoint is raised only afterwards, because the trained weights exist only in memory.
        """
        self._finish_write(run, is_last=True)
        try:
            self._save_result(run, step)
        except Exception:
            if self._failure is not None:
                log.warning(f"checkpoint not saved: {self._failure}")
            raise
        if self._failure is not None:
            raise self._failure

    def _save_result(self, run: TrainingRun, step: int) -> None:
        best = self._best.step if run.plan.schedule.load_best_model_at_end else None
        checkpoint = _verify_best(run, best)
        saved_step = broadcast_object(run.engine.accelerator, step if checkpoint is None else checkpoint.manifest.step)
        if saved_step == step:
            save_weights(run, run.paths.adapter)
        if not run.engine.is_main:
            return
        if checkpoint is not None and saved_step != step:
            sharded = checkpoint.manifest.sharded
            weights = read_exact_weights(run, checkpoint.folder, sharded=sharded)
            write_weights(run, weights, run.paths.adapter)
        if run.plan.data.new_tokens:
            load_planned_tokenizer(run.plan, base_folders(Path(run.plan.data.folder))).write_files(run.paths.adapter)
        write_card(run.plan, run.paths, steps_done=step, saved_step=saved_step)

    def close(self) -> None:
        """Wait for the current write to finish when the training ends with an error."""
        with suppress(Exception):
            self._writer.wait()

    def _finish_write(self, run: TrainingRun, *, is_last: bool) -> None:
        """Wait for the previous checkpoint; if it failed, end the run unless the plan says to continue.

        `is_last`: training is over, so the error is raised only after the weights are saved.
        """
        self._guard(run, lambda: self._writer.wait(lambda: run.heartbeat.beat("writing a checkpoint")), is_last=is_last)

    def _guard(self, run: TrainingRun, work: Callable[[], None], *, is_last: bool) -> None:
        try:
            work()
        except Exception as error:
            if isinstance(error, LauncherError) and run.plan.guards.save_errors == "continue":
                log.warning(f"checkpoint not saved: {error}")
            elif is_last:
                self._failure = error
            else:
                raise


def _verify_best(run: TrainingRun, best: int | None) -> Checkpoint | None:
    """Return the best step's checkpoint on rank 0 if it is intact, else None."""
    if best is None or not run.engine.is_main:
        return None
    checkpoint = read_checkpoint(run.paths.checkpoint(best))
    if isinstance(checkpoint, Damaged):
        log.warning(f"{checkpoint}; saving the last weights instead of the best")
        return None
    return checkpoint


def _write(run: TrainingRun, snapshot: Snapshot, best: int | None) -> None:
    write_snapshot(run, snapshot)
    _delete_old(run, best, newest=snapshot.manifest.step)


def _delete_old(run: TrainingRun, best: int | None, newest: int) -> None:
    """Delete checkpoints beyond save_total_limit, but never the new one, which is verified, or the best one."""
    limit = run.plan.schedule.save_total_limit
    steps = [step_of(folder) for folder in reversed(list_checkpoints(run.paths))]
    while limit is not None and len(steps) > limit:
        later = [step for step in steps if step > newest]  # damaged: the run resumed from an older one
        oldest = next((step for step in (*later, *steps) if step not in (best, newest)), None)
        if oldest is None:
            return
        steps.remove(oldest)
        folder = run.paths.checkpoint(oldest)
        with suppress(OSError):  # renamed first: a partly deleted folder must not look like a checkpoint
            shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.deleting")))
