"""The training script with phase records: each rank writes its phase to a file, and tests set how long saving takes.

accelerate starts it instead of launcher/train.py, with the same rendered command. Functions are wrapped, not replaced.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.core.metrics import StepMetrics
from launcher.train import run as run_training
from launcher.training import trainer as session
from launcher.training.checkpoint import snapshot as checkpoint
from launcher.training.checkpoint import weights as saved
from launcher.training.engine.run import TrainingRun
from launcher.training.evaluation.heldout_loss import Evaluator
from launcher.training.observers import checkpointer as saving
from launcher.training.observers.console import Console

PHASES_VARIABLE = "LAUNCHER_TEST_PHASES"  # folder of the phase files
START_SECONDS_VARIABLE = "LAUNCHER_TEST_START_SECONDS"  # additional start-up time
STEP_SECONDS_VARIABLE = "LAUNCHER_TEST_STEP_SECONDS"
SAVE_SECONDS_VARIABLE = "LAUNCHER_TEST_SAVE_SECONDS"  # additional time per write, rename and deletion
_SECONDS_BETWEEN_SIGNALS = 2.5  # signals in quick succession count as one request to stop
SIGNALS_VARIABLE = "LAUNCHER_TEST_SIGNALS"  # STEP:RANK:NUMBER,...: a rank sends itself a signal after a step
PHASES = ("starting", "training", "evaluating", "saving", "ending")
_WIDTH = 24


class Note:
    """A file with one word that can be read after the process was killed."""

    def __init__(self, name: str) -> None:
        folder = os.environ.get(PHASES_VARIABLE)
        self._file = None if folder is None else os.open(Path(folder) / name, os.O_CREAT | os.O_WRONLY)

    def write(self, word: str) -> None:
        if self._file is not None:
            os.pwrite(self._file, word.ljust(_WIDTH).encode(), 0)


def read_note(folder: Path, name: str) -> str:
    file = folder / name
    return file.read_text().strip() if file.exists() else ""


def read_phase(folder: Path, rank: int) -> tuple[str, str]:
    """Return the phase and its save stage. Rank 0 saves while all ranks continue to train."""
    save_stage = read_note(folder, "save-stage")
    if save_stage:
        return "saving", save_stage
    return read_note(folder, f"rank-{rank}") or "starting", ""


RANK = int(os.environ.get("RANK", "0"))
PHASE = Note(f"rank-{RANK}")
SAVE_STAGE = Note("save-stage" if RANK == 0 else "no-save-stage")


class PhaseRecorder(Console):
    def on_start(self, run: TrainingRun, step: int) -> None:
        super().on_start(run, step)
        PHASE.write("training")

    _has_sent = False

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        super().on_step(run, metrics)
        time.sleep(float(os.environ.get(STEP_SECONDS_VARIABLE, "0")))
        for entry in filter(None, os.environ.get(SIGNALS_VARIABLE, "").split(",")):
            step, rank, number = map(int, entry.split(":"))
            if (step, rank) == (metrics.step, run.engine.rank):
                time.sleep(_SECONDS_BETWEEN_SIGNALS if self._has_sent else 0.0)
                self._has_sent = True
                os.kill(os.getpid(), signal.Signals(number))

    def on_end(self, run: TrainingRun, step: int) -> None:
        super().on_end(run, step)
        PHASE.write("ending")


def record_phase(phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a rank's main thread so that its phase is recorded."""

    def recorded(*arguments: Any, **more: Any) -> Any:
        PHASE.write(phase)
        try:
            return work(*arguments, **more)
        finally:
            PHASE.write("training")

    return recorded


def slow_down(save_stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with a pause before and after it: the files on disk differ."""

    def pause(where: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            SAVE_STAGE.write(f"{where} {save_stage}")
        time.sleep(float(os.environ.get(SAVE_SECONDS_VARIABLE, "0")) / 2)

    def slow(*arguments: Any, **more: Any) -> Any:
        pause("before")
        result = work(*arguments, **more)
        pause("after")
        return result

    return slow


def record_save(work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of rank 0's writer thread so that its save stage is recorded."""

    def recorded(*arguments: Any, **more: Any) -> Any:
        SAVE_STAGE.write("beginning")
        try:
            return work(*arguments, **more)
        finally:
            SAVE_STAGE.write("")

    return recorded


def wrap(owner: object, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


if __name__ == "__main__":
    PHASE.write("starting")
    time.sleep(float(os.environ.get(START_SECONDS_VARIABLE, "0")))
    SAVE_STAGE.write("")
    vars(session)["Console"] = PhaseRecorder
    wrap(Evaluator, "evaluate", lambda work: record_phase("evaluating", work))
    wrap(saving, "take_snapshot", lambda work: record_phase("saving", work))
    wrap(saving, "_write", record_save)
    vars(saving)["shutil"] = types.SimpleNamespace(rmtree=slow_down("deleting", shutil.rmtree))
    wrap(checkpoint, "write_exact_weights", lambda work: slow_down("weights", work))
    wrap(checkpoint, "save_file", lambda work: slow_down("states", work))
    wrap(checkpoint, "write_text_atomically", lambda work: slow_down("the manifest", work))
    wrap(checkpoint, "read_checkpoint", lambda work: slow_down("verification", work))
    wrap(saved, "sync_folder", lambda work: slow_down("renaming", work))  # before and after it
    run_training()
