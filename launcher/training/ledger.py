"""Where the seconds of a run go: goodput, and what start, compiling, data, evaluation, checkpoints and restarts took.

Kept in the metrics themselves: a run that is taken up again finds in its last row what was spent before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher import metrics
from launcher.metrics import LOST_SECONDS, CutMetrics, StepMetrics
from launcher.training.watchdog import Doing, Pulse

_LOST: Mapping[Doing, str] = {
    "compiling": metrics.COMPILE_SECONDS,
    "evaluating": metrics.EVALUATION_SECONDS,
    "saving": metrics.CHECKPOINT_SECONDS,
    "writing a checkpoint": metrics.CHECKPOINT_SECONDS,
    "saving what was trained": metrics.CHECKPOINT_SECONDS,
}


class Ledger:
    """Of one process; several attempts within it, where memory ran out, are several beginnings."""

    def __init__(self, process_began: float | None = None) -> None:
        self._process_began = find_process_start() if process_began is None else process_began
        self._earlier_seconds: float | None = None  # of other processes; None: not begun yet
        self._parts = dict.fromkeys(LOST_SECONDS, 0.0)
        self._pulse = Pulse()
        self._counted: dict[Doing, float] = {}
        self._starting = metrics.START_SECONDS
        self._first: Mapping[str, float] = {}  # what the first beginning took, where no row tells of it

    def begin(self, pulse: Pulse, told: CutMetrics, earlier_seconds: float = 0.0) -> None:
        """What was told behind the last row that is kept was trained in vain. `earlier_seconds` is what other processes
        have spent on this run: rows that tell of it may have been cut away."""
        is_first = self._earlier_seconds is None and earlier_seconds == 0.0
        if self._earlier_seconds is None:
            self._earlier_seconds = earlier_seconds
        before = told.kept[-1].values if told.kept else self._first
        self._parts = {part: before.get(part, 0.0) for part in LOST_SECONDS}
        self._pulse, self._counted = pulse, dict(pulse.spent())
        now = self.total_seconds()
        if is_first:
            self._parts[metrics.COMPILE_SECONDS] = self._counted.get("compiling", 0.0)
            self._parts[metrics.START_SECONDS] = now - self._parts[metrics.COMPILE_SECONDS]
            self._first = {**self._parts, metrics.TOTAL_SECONDS: now}
        else:
            self._starting = metrics.RESTART_SECONDS
            self._parts[metrics.RESTART_SECONDS] += now - before.get(metrics.TOTAL_SECONDS, 0.0)

    def book(self, part: str, seconds: float) -> None:
        """Lost within a step: the device had no data, something was compiled, or the step did not count."""
        self._parts[part] += seconds

    def total_seconds(self) -> float:
        return (self._earlier_seconds or 0.0) + time.monotonic() - self._process_began

    def read(self) -> dict[str, float]:
        total, parts = self.total_seconds(), dict(self._parts)
        for doing, seconds in self._pulse.spent().items():
            part = self._starting if doing == "starting" else _LOST.get(doing)
            if part is not None:
                parts[part] += seconds - self._counted.get(doing, 0.0)
        lost = min(total, sum(parts.values()))
        return {metrics.TOTAL_SECONDS: total, metrics.GOODPUT: 1.0 - lost / max(1e-9, total), **parts}


def find_spent(rows: Iterable[StepMetrics]) -> float:
    return max((row.values.get(metrics.TOTAL_SECONDS, 0.0) for row in rows), default=0.0)


def find_process_start() -> float:
    """On the monotonic clock: importing torch is part of the start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # the 22nd of all: since the machine was booted
    age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)
