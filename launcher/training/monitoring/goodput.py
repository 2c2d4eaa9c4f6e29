"""Goodput: where the wall-clock time of a run goes (start, compilation, data, evaluation, checkpoints, restarts).

The totals are logged with the metrics: a resumed run reads the time spent so far from the last row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from launcher.core import metrics
from launcher.core.metrics import LOST_SECONDS, CutMetrics, StepMetrics
from launcher.training.runtime.startup_timer import read_process_start
from launcher.training.runtime.watchdog import Activity, Heartbeat

_METRIC_BY_ACTIVITY: Mapping[Activity, str] = {
    "compiling": metrics.COMPILE_SECONDS,
    "evaluating": metrics.EVALUATION_SECONDS,
    "saving": metrics.CHECKPOINT_SECONDS,
    "writing a checkpoint": metrics.CHECKPOINT_SECONDS,
    "saving what was trained": metrics.CHECKPOINT_SECONDS,
}


class GoodputTracker:
    """Accounts for the time of one process, which starts training again after each out-of-memory fallback."""

    def __init__(self, process_start: float | None = None) -> None:
        self._process_start = read_process_start() if process_start is None else process_start
        self._earlier_seconds: float | None = None  # of earlier processes; None: not started yet
        self._parts = dict.fromkeys(LOST_SECONDS, 0.0)
        self._heartbeat = Heartbeat()
        self._counted: dict[Activity, float] = {}
        self._starting = metrics.START_SECONDS
        self._first: Mapping[str, float] = {}  # what the first start took, if no row recorded it

    def start(self, heartbeat: Heartbeat, recorded: CutMetrics, earlier_seconds: float = 0.0) -> None:
        """Start counting. After a restart or a fallback, the time since the last kept row of metrics counts as lost.

        `earlier_seconds` is the time spent by earlier processes, whose rows may have been dropped.
        """
        is_first = self._earlier_seconds is None and earlier_seconds == 0.0
        if self._earlier_seconds is None:
            self._earlier_seconds = earlier_seconds
        before = recorded.kept[-1].values if recorded.kept else self._first
        self._parts = {part: before.get(part, 0.0) for part in LOST_SECONDS}
        self._heartbeat, self._counted = heartbeat, dict(heartbeat.spent())
        now = self.total_seconds()
        if is_first:
            self._parts[metrics.COMPILE_SECONDS] = self._counted.get("compiling", 0.0)
            self._parts[metrics.START_SECONDS] = now - self._parts[metrics.COMPILE_SECONDS]
            self._first = {**self._parts, metrics.TOTAL_SECONDS: now}
        else:
            self._starting = metrics.RESTART_SECONDS
            self._parts[metrics.RESTART_SECONDS] += now - before.get(metrics.TOTAL_SECONDS, 0.0)

    def add(self, part: str, seconds: float) -> None:
        """Add time lost within a step: waiting for data, compilation, or a skipped step."""
        self._parts[part] += seconds

    def total_seconds(self) -> float:
        """Return the time spent on this run, including earlier processes."""
        return (self._earlier_seconds or 0.0) + time.monotonic() - self._process_start

    def read(self) -> dict[str, float]:
        """Return total time, goodput and lost time by cause."""
        total, parts = self.total_seconds(), dict(self._parts)
        for activity, seconds in self._heartbeat.spent().items():
            part = self._starting if activity == "starting" else _METRIC_BY_ACTIVITY.get(activity)
            if part is not None:
                parts[part] += seconds - self._counted.get(activity, 0.0)
        lost = min(total, sum(parts.values()))
        return {metrics.TOTAL_SECONDS: total, metrics.GOODPUT: 1.0 - lost / max(1e-9, total), **parts}


def get_total_seconds(rows: Iterable[StepMetrics]) -> float:
    """Return the largest total run time that rows of metrics contain; 0 without rows."""
    return max((row.values.get(metrics.TOTAL_SECONDS, 0.0) for row in rows), default=0.0)
