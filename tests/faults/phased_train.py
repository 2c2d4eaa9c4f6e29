"""The training script, watched: each rank tells in a file what it does, and saving takes as long as a test wants.

Started by accelerate in place of launcher/train.py, by the same rendered command. Nothing of ours is replaced: what is
called in a phase is called in between two lines that note it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.metrics import StepMetrics
from launcher.train import main
from launcher.training import checkpoint, saved, session
from launcher.training.evaluation import Evaluator
from launcher.training.observers import saving
from launcher.training.observers.console import Console
from launcher.training.run import Run

PHASES_VARIABLE = "LAUNCHER_TEST_PHASES"  # the folder of the files
START_SECONDS_VARIABLE = "LAUNCHER_TEST_START_SECONDS"  # as imports take
STEP_SECONDS_VARIABLE = "LAUNCHER_TEST_STEP_SECONDS"
SAVE_SECONDS_VARIABLE = "LAUNCHER_TEST_SAVE_SECONDS"  # before each file, each rename, each deletion
_APART_SECONDS = 2.5  # signals that come together are one wish
SIGNALS_VARIABLE = "LAUNCHER_TEST_SIGNALS"  # STEP:RANK:NUMBER,...: a rank sends itself a signal behind a step
PHASES = ("starting", "training", "evaluating", "saving", "ending")
_WIDTH = 24


class Note:
    """A file with one word. A killed process leaves the last one behind."""

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
    """The phase, and what exactly is done in it. The first rank saves while all of them train on."""
    piece = read_note(folder, "piece")
    if piece:
        return "saving", piece
    return read_note(folder, f"rank-{rank}") or "starting", ""


RANK = int(os.environ.get("RANK", "0"))
PHASE = Note(f"rank-{RANK}")
PIECE = Note("piece" if RANK == 0 else "no-piece")


class Telling(Console):
    def on_start(self, run: Run, step: int) -> None:
        super().on_start(run, step)
        PHASE.write("training")

    _has_sent = False

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        super().on_step(run, metrics)
        time.sleep(float(os.environ.get(STEP_SECONDS_VARIABLE, "0")))
        for asked in filter(None, os.environ.get(SIGNALS_VARIABLE, "").split(",")):
            step, rank, number = map(int, asked.split(":"))
            if (step, rank) == (metrics.step, run.engine.rank):
                time.sleep(_APART_SECONDS if self._has_sent else 0.0)
                self._has_sent = True
                os.kill(os.getpid(), signal.Signals(number))

    def on_end(self, run: Run, step: int) -> None:
        super().on_end(run, step)
        PHASE.write("ending")


def during(phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """In the main thread of a rank."""

    def told(*arguments: Any, **more: Any) -> Any:
        PHASE.write(phase)
        try:
            return work(*arguments, **more)
        finally:
            PHASE.write("training")

    return told


def slowed(piece: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A pause before and one behind: what lies on the disk is not the same in them."""

    def pause(where: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            PIECE.write(f"{where} {piece}")
        time.sleep(float(os.environ.get(SAVE_SECONDS_VARIABLE, "0")) / 2)

    def slow(*arguments: Any, **more: Any) -> Any:
        pause("before")
        result = work(*arguments, **more)
        pause("behind")
        return result

    return slow


def whole_save(work: Callable[..., Any]) -> Callable[..., Any]:
    """In the thread of the first rank that writes."""

    def told(*arguments: Any, **more: Any) -> Any:
        PIECE.write("beginning")
        try:
            return work(*arguments, **more)
        finally:
            PIECE.write("")

    return told


def wrap(owner: object, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


if __name__ == "__main__":
    PHASE.write("starting")
    time.sleep(float(os.environ.get(START_SECONDS_VARIABLE, "0")))
    PIECE.write("")
    vars(session)["Console"] = Telling
    wrap(Evaluator, "evaluate", lambda work: during("evaluating", work))
    wrap(saving, "take_snapshot", lambda work: during("saving", work))
    wrap(saving, "_write", whole_save)
    vars(saving)["shutil"] = types.SimpleNamespace(rmtree=slowed("deleting", shutil.rmtree))
    wrap(checkpoint, "write_exactly", lambda work: slowed("weights", work))
    wrap(checkpoint, "save_file", lambda work: slowed("states", work))
    wrap(checkpoint, "write_text_atomically", lambda work: slowed("the manifest", work))
    wrap(checkpoint, "read_checkpoint", lambda work: slowed("proof", work))
    wrap(saved, "sync_folder", lambda work: slowed("renaming", work))  # before and behind it
    sys.exit(main())
