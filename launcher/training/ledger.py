"""Where the seconds of a run go: goodput, and what start, compiling, data, evaluation, checkpoints and restarts took.

Kept in the metrics themselves: a run that is taken up again finds in its last row what was spent before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from launcher import metrics
from launcher.metrics import CutMetrics
from launcher.training.watchdog import Doing, Pulse

_LOST: Mapping[Doing, str] = {
    "compiling": metrics.COMPILE_SECONDS,
    "waiting for data": metrics.DATA_SECONDS,
    "evaluating": metrics.EVALUATION_SECONDS,
    "saving": metrics.CHECKPOINT_SECONDS,
    "writing a checkpoint": metrics.CHECKPOINT_SECONDS,
    "saving what was trained": metrics.CHECKPOINT_SECONDS,
}
PARTS = (
    metrics.START_SECONDS,
    *dict.fromkeys(_LOST.values()),
    metrics.SKIPPED_SECONDS,
    metrics.RESTART_SECONDS,
)


class Ledger:
    """Of one process; several attempts within it, where memory ran out, are several beginnings."""

    def __init__(self, process_began: float | None = None) -> None:
        self._process_began = find_process_start() if process_began is None else process_began
        self._earlier_seconds: float | None = None  # of other processes; None: not begun yet
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._pulse = Pulse()
        self._counted: dict[Doing, float] = {}
        self._starting = metrics.START_SECONDS

    def begin(self, pulse: Pulse, told: CutMetrics) -> None:
        """What was told behind the last row that is kept was trained in vain."""
        is_first = self._earlier_seconds is None and not (told.kept or told.rest)
        if self._earlier_seconds is None:
            totals = (row.values.get(metrics.TOTAL_SECONDS, 0.0) for row in (*told.kept[-1:], *told.rest))
            self._earlier_seconds = max(totals, default=0.0)
        before = told.kept[-1].values if told.kept else {}
        self._parts = {part: before.get(part, 0.0) for part in PARTS}
        self._pulse, self._counted = pulse, dict(pulse.spent())
        now = self.total_seconds()
        if is_first:
            self._parts[metrics.COMPILE_SECONDS] = self._counted.get("compiling", 0.0)
            self._parts[metrics.START_SECONDS] = now - self._parts[metrics.COMPILE_SECONDS]
        else:
            self._starting = metrics.RESTART_SECONDS
            self._parts[metrics.RESTART_SECONDS] += now - before.get(metrics.TOTAL_SECONDS, 0.0)

    def pass_over(self, seconds: float) -> None:
        """Of a step that did not count."""
        self._parts[metrics.SKIPPED_SECONDS] += seconds

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


def find_process_start() -> float:
    """On the monotonic clock: importing torch is part of the start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # the 22nd of all: since the machine was booted
    age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)
