"""Detect a hanging training, report rank and stack, and end it, before a collective times out.

Every rank records its current activity. A thread watches it and publishes it in the rendezvous store, so that the rank
that notices a hang first can name the rank that is waited for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from launcher.core.errors import ExitCode, RunFailedError
from launcher.core.processes import find_children
from launcher.training.runtime.rendezvous import connect_store

_POLL_SECONDS = 1.0
_PUBLISH_SECONDS = 3.0
_SILENT_SECONDS = 15.0  # after which a rank that publishes nothing counts as frozen
_RANK_0_FIRST_SECONDS = 8.0  # other ranks wait this long for rank 0, whose message is recorded
_STORE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The last published activity of a rank."""

    step: int
    activity: str
    seconds: float  # so far
    published_at: float  # on its clock


Activity = Literal[
    "starting",
    "compiling",
    "waiting for data",
    "training",
    "evaluating",
    "saving",
    "writing a checkpoint",
    "saving what was trained",
]


_BEAT_SECONDS = 1.0


class Heartbeat:
    """The current activity of a rank: set by the training, read by the watchdog and by the goodput tracker."""

    def __init__(self) -> None:
        self.step = 0
        self.activity: Activity = "starting"
        self.since = time.monotonic()
        self._spent: dict[Activity, float] = {}

    def beat(self, activity: Activity, step: int | None = None) -> None:
        """Set the current activity, and the current step if it changes."""
        now = time.monotonic()
        self._spent[self.activity] = self._spent.get(self.activity, 0.0) + now - self.since
        self.activity, self.since = activity, now
        if step is not None:
            self.step = step

    @contextmanager
    def beating(self, activity: Activity) -> Iterator[None]:
        """Set an activity that may take long, and call `beat` regularly, which shows that the process is alive."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_BEAT_SECONDS):
                self.beat(activity)

        thread = threading.Thread(target=beat, daemon=True)
        self.beat(activity)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def spent(self) -> dict[Activity, float]:
        """Return the seconds spent on each activity so far."""
        return {**self._spent, self.activity: self._spent.get(self.activity, 0.0) + self.seconds}

    @property
    def seconds(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self.since

    def status(self) -> RankStatus:
        """Return this rank's step, activity and its duration, for other ranks to read."""
        return RankStatus(step=self.step, activity=self.activity, seconds=self.seconds, published_at=time.time())


class Watchdog:
    """Ends the process when its activity takes too long, after calling `on_hang` with a message."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        *,
        rank: int,
        num_ranks: int,
        limit_seconds: float,
        stacks: Path,
        on_hang: Callable[[str], None],
    ) -> None:
        self._heartbeat, self._rank, self._num_ranks = heartbeat, rank, num_ranks
        self._silent_seconds = min(_SILENT_SECONDS, max(2 * _PUBLISH_SECONDS, limit_seconds / 2))
        self._limit = limit_seconds + (_RANK_0_FIRST_SECONDS if rank else 0.0)
        self._stacks, self._on_hang = stacks, on_hang
        self._store = connect_store(timedelta(seconds=_STORE_SECONDS)) if num_ranks > 1 else None
        self._stop = threading.Event()

    def start(self) -> None:
        """Start watching."""
        self._heartbeat.beat("starting")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _watch(self) -> None:
        published = 0.0
        while True:
            if self._store is not None and time.monotonic() - published > _PUBLISH_SECONDS:
                with suppress(RuntimeError):  # what torch raises if the store is gone
                    self._store.set(_key(self._rank), json.dumps(asdict(self._heartbeat.status())))
                published = time.monotonic()
            if self._heartbeat.seconds > self._limit:
                self._exit()
            if self._stop.wait(_POLL_SECONDS):
                return

    def _exit(self) -> None:
        """End the process, because the frozen main thread cannot raise."""
        self._write_stacks()
        error = RunFailedError(self._explain(), hint=f"stack traces of rank {self._rank}: {self._stacks}")
        self._on_hang(str(error))
        os._exit(int(ExitCode.RUN_FAILED))

    def _write_stacks(self) -> None:
        try:
            with self._stacks.open("w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def _explain(self) -> str:
        own = self._heartbeat.status()
        where = f"step {own.step:,}" if own.step else "its first step"
        what = f"rank {self._rank} has been {own.activity} for {own.seconds:.0f} s at {where}"
        others = self._describe_others()
        workers = describe_workers() if own.activity == "waiting for data" else ""
        return ". ".join(part for part in (f"training hangs: {what}", others, workers) if part)

    def _describe_others(self) -> str:
        if self._store is None:
            return ""
        try:
            published = [rank for rank in range(self._num_ranks) if self._store.check([_key(rank)])]
            statuses = {rank: RankStatus(**json.loads(self._store.get(_key(rank)))) for rank in published}
        except RuntimeError:
            return "The rendezvous store does not respond: the process that hosts it, or its node, is frozen"
        lines = []
        for rank in range(self._num_ranks):
            if rank == self._rank:
                continue
            status = statuses.get(rank)
            if status is None:
                lines.append(f"rank {rank} is frozen: it never reported")
                continue
            silent = time.time() - status.published_at
            if silent > self._silent_seconds:
                lines.append(f"rank {rank} is frozen: no report for {silent:.0f} s (step {status.step})")
            elif status.activity != self._heartbeat.activity or status.step != self._heartbeat.step:
                lines.append(f"rank {rank} has been {status.activity} for {status.seconds:.0f} s (step {status.step})")
        return "; ".join(lines)


def _key(rank: int) -> str:
    """Return the key of a rank's status in the rendezvous store; an earlier attempt's value is overwritten at once."""
    return f"launcher/heartbeat/{rank}"


def describe_workers() -> str:
    """Describe the data loader workers and their process states."""
    children = find_children(os.getpid())
    if not children:
        return ""
    return "Its data workers: " + ", ".join(f"{pid} ({state})" for pid, state in children)
