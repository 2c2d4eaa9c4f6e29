"""A training that no longer moves: found out, told with rank and stack, and ended, long before a collective gives up.

Every rank notes what it is about to do. A thread beside it looks at these notes, and tells the other ranks by the
rendezvous store, so that whoever notices first can say who is being waited for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from launcher.errors import ExitCode, RunFailedError
from launcher.processes import find_children

_LOOK_EVERY_SECONDS = 1.0
_TELL_EVERY_SECONDS = 3.0
_SILENT_SECONDS = 15.0  # after which a rank that no longer tells anything is taken for frozen
_LATER_SECONDS = 8.0  # other ranks give the first one this time to speak, whose words are recorded
_STORE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What a rank was doing when it was last heard of."""

    step: int
    doing: str
    seconds: float  # for so long by then
    told_at: float  # its clock


Doing = Literal[
    "starting",
    "compiling",
    "waiting for data",
    "training",
    "evaluating",
    "saving",
    "writing a checkpoint",
    "saving what was trained",
]


class Pulse:
    """Written by the training, read by the watchdog and by the ledger of its time."""

    def __init__(self) -> None:
        self.step = 0
        self.doing: Doing = "starting"
        self.since = time.monotonic()
        self._spent: dict[Doing, float] = {}

    def beat(self, doing: Doing, step: int | None = None) -> None:
        now = time.monotonic()
        self._spent[self.doing] = self._spent.get(self.doing, 0.0) + now - self.since
        self.doing, self.since = doing, now
        if step is not None:
            self.step = step

    def spent(self) -> dict[Doing, float]:
        """Seconds on each of what was done, up to now."""
        return {**self._spent, self.doing: self._spent.get(self.doing, 0.0) + self.seconds}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def note(self) -> Note:
        return Note(step=self.step, doing=self.doing, seconds=self.seconds, told_at=time.time())


class Watchdog:
    """`give_up` is called, from its thread, with what to say; the process ends behind it."""

    def __init__(
        self,
        pulse: Pulse,
        *,
        rank: int,
        num_ranks: int,
        limit_seconds: float,
        stacks: Path,
        give_up: Callable[[str], None],
    ) -> None:
        self._pulse, self._rank, self._num_ranks = pulse, rank, num_ranks
        self._silent_seconds = min(_SILENT_SECONDS, max(2 * _TELL_EVERY_SECONDS, limit_seconds / 2))
        self._limit = limit_seconds + (_LATER_SECONDS if rank else 0.0)
        self._stacks, self._give_up = stacks, give_up
        self._board = _Board(rank) if num_ranks > 1 else None
        self._ends = threading.Event()

    def start(self) -> None:
        self._pulse.beat("starting")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ends.set()

    def _watch(self) -> None:
        told = 0.0
        while True:
            if self._board is not None and time.monotonic() - told > _TELL_EVERY_SECONDS:
                self._board.tell(self._pulse.note())
                told = time.monotonic()
            if self._pulse.seconds > self._limit:
                self._end()
            if self._ends.wait(_LOOK_EVERY_SECONDS):
                return

    def _end(self) -> None:
        """A frozen training cannot raise anything."""
        self._write_stacks()
        error = RunFailedError(self._explain(), hint=f"the stacks of rank {self._rank} are in {self._stacks}")
        self._give_up(str(error))
        os._exit(int(ExitCode.RUN_FAILED))

    def _write_stacks(self) -> None:
        try:
            with self._stacks.open("w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def _explain(self) -> str:
        mine = self._pulse.note()
        where = f"step {mine.step:,}" if mine.step else "its first step"
        what = f"rank {self._rank} has been {mine.doing} for {mine.seconds:.0f} s at {where}"
        others = self._describe_others()
        workers = describe_workers() if "data" in mine.doing else ""
        return ". ".join(part for part in (f"the training makes no progress: {what}", others, workers) if part)

    def _describe_others(self) -> str:
        if self._board is None:
            return ""
        notes = self._board.read(self._num_ranks)
        if notes is None:
            return "The rendezvous store does not answer: the process that holds it is frozen, or its node is"
        said = []
        for rank in range(self._num_ranks):
            note = notes.get(rank)
            silent = None if note is None else time.time() - note.told_at
            if rank == self._rank:
                continue
            if note is None or silent is None:
                said.append(f"rank {rank} is frozen: nothing was ever heard of it")
            elif silent > self._silent_seconds:
                said.append(f"rank {rank} is frozen: nothing was heard of it for {silent:.0f} s (step {note.step})")
            elif note.doing != self._pulse.doing or note.step != self._pulse.step:
                said.append(f"rank {rank} has been {note.doing} for {note.seconds:.0f} s (step {note.step})")
        return "; ".join(said)


class _Board:
    """Notes of all ranks, in the store that the agent or the first rank keeps."""

    def __init__(self, rank: int) -> None:
        from launcher.training.sharing import connect

        self._prefix = "launcher/pulse"  # what an earlier attempt left there is written over at once
        self._rank = rank
        self._store = connect(timedelta(seconds=_STORE_SECONDS))

    def tell(self, note: Note) -> None:
        try:
            self._store.set(f"{self._prefix}/{self._rank}", json.dumps(asdict(note)))
        except RuntimeError:  # torch's errors of a store that is gone are of this kind
            return

    def read(self, num_ranks: int) -> dict[int, Note] | None:
        """None: nobody answers."""
        try:
            known = [rank for rank in range(num_ranks) if self._store.check([f"{self._prefix}/{rank}"])]
            return {rank: Note(**json.loads(self._store.get(f"{self._prefix}/{rank}"))) for rank in known}
        except RuntimeError:
            return None


def describe_workers() -> str:
    """The processes that make batches, and whether they are stopped."""
    children = find_children(os.getpid())
    if not children:
        return ""
    return "Its data workers: " + ", ".join(f"{pid} ({state})" for pid, state in children)
