"""Runs the memory grid, resumable: measured cases are skipped, cases that would not finish in time are not started.

All cases run in one worker process, which makes it fast. If it dies or reports that it is in a bad state, the next case
starts in a new one.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory_grid.cases import GridCase
from benchmarks.memory_grid.rows import ALLOCATOR, GridRow, append_row, load_rows
from launcher.bench.worker import MeasurementFailedError, MeasurementProcess
from launcher.core.frozen_model import Frozen
from launcher.core.units import bytes_to_gib

WORKER_MODULE = "benchmarks.memory_grid.worker"
_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"  # as in trainings
# Assumed duration of a case until a similar one is measured: a constant, and seconds per billion parameters.
_EAGER_SECONDS, _COMPILED_SECONDS, _SECONDS_PER_BILLION = 8.0, 40.0, 4.0
_START_SECONDS = 25.0  # of a worker: importing torch, creating the CUDA context
_MARGIN = 1.3  # on the duration of a similar case
_MIN_LIMIT_SECONDS, _LIMIT_FACTOR = 240.0, 5.0
_BILLION_PARAMETERS = {"tiny": 0.0, "0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2}
_MAX_ERROR_CHARS = 600

Report = Callable[[str], None]


class GridSpec(Frozen):
    """Specification of a worker: steps per case."""

    warmup_steps: int = 3  # the first compiles, and the optimizer allocates its state
    timed_steps: int = 3

    @property
    def num_steps(self) -> int:
        """Steps per case."""
        return self.warmup_steps + self.timed_steps


class CaseReply(Frozen):
    """Reply of a worker to one case."""

    row: GridRow
    can_continue: bool  # False: the worker exits, because its next measurement would be wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """State of the requested cases."""

    num_measured: int
    num_left_out: int
    failed: tuple[str, ...]
    num_left: int
    next_seconds: float | None  # estimate for the shortest of those left


def run_grid(cases: Sequence[GridCase], out: Path, minutes: float, report: Report, *, again: bool = False) -> Progress:
    """Run the cases until all are tried or the time is over; `again`: retry those that failed."""
    deadline = time.monotonic() + 60 * minutes
    pending = list_pending(cases, load_rows(out), again=again)
    with (
        tempfile.TemporaryDirectory(prefix="memory-grid-") as folder,
        _RestartingWorker(Path(folder), report) as worker,
    ):
        while pending:
            rows = load_rows(out)
            case = _find_next(pending, rows, deadline - time.monotonic() - worker.start_seconds)
            if case is None:
                break
            pending.remove(case)
            row = worker.measure(case, _limit_seconds(case, rows))
            append_row(out, row)
            report(f"{len(cases) - len(pending)}/{len(cases)}  {describe_row(row)}")
    return make_progress(cases, load_rows(out), pending)


def list_pending(cases: Sequence[GridCase], rows: Sequence[GridRow], *, again: bool = False) -> list[GridCase]:
    """Return the cases that have no row yet; `again`: or a failed one."""
    tried = {row.case for row in rows if row.error is None or not again}
    return [case for case in cases if case.name not in tried]


def make_progress(cases: Sequence[GridCase], all_rows: Sequence[GridRow], pending: Sequence[GridCase]) -> Progress:
    """Count measured, skipped, failed and pending cases."""
    names = {case.name for case in cases}
    rows = [row for row in all_rows if row.case in names]
    return Progress(
        num_measured=sum(row.is_measured for row in rows),
        num_left_out=sum(row.left_out is not None for row in rows),
        failed=tuple(row.case for row in rows if row.error is not None),
        num_left=len(pending),
        next_seconds=min((estimate_seconds(case, all_rows) for case in pending), default=None),
    )


def estimate_seconds(case: GridCase, rows: Sequence[GridRow]) -> float:
    """Estimate the duration from the longest case with the same base and compile mode; without one, guess."""
    modes = ("-compiled", "-graphed") if case.compiled else ("-eager",)
    similar = [row.case_seconds for row in rows if row.model == case.base and any(mode in row.case for mode in modes)]
    known = [seconds for seconds in similar if seconds is not None]
    if known:
        return _MARGIN * max(known)
    constant = _COMPILED_SECONDS if case.compiled else _EAGER_SECONDS
    return constant + _SECONDS_PER_BILLION * _BILLION_PARAMETERS[case.base]


def _find_next(pending: Sequence[GridCase], rows: Sequence[GridRow], seconds: float) -> GridCase | None:
    """Return the first case that fits into the time left."""
    return next((case for case in pending if estimate_seconds(case, rows) <= seconds), None)


def _limit_seconds(case: GridCase, rows: Sequence[GridRow]) -> float:
    return _START_SECONDS + max(_MIN_LIMIT_SECONDS, _LIMIT_FACTOR * estimate_seconds(case, rows))


def describe_row(row: GridRow) -> str:
    """Format a row as a progress line."""
    if row.left_out is not None:
        return f"{row.case}: skipped: {row.left_out}"
    if row.error is not None:
        return f"{row.case}: failed: {row.error.splitlines()[0]}"
    parts = [f"{row.tokens_per_second:,.0f} tokens/s" if row.tokens_per_second else "", f"{row.case_seconds:.0f} s"]
    if row.peak_allocated_bytes and row.predicted_bytes:
        error = row.predicted_bytes / row.peak_allocated_bytes - 1
        parts.insert(0, f"{bytes_to_gib(row.peak_allocated_bytes):.2f} GiB, estimate {100 * error:+.1f} %")
    return f"{row.case}: {', '.join(filter(None, parts))}"


class _RestartingWorker:
    """The worker process, restarted after it has died."""

    def __init__(self, folder: Path, report: Report) -> None:
        self._folder, self._report, self._number = folder, report, 0
        self._process: MeasurementProcess | None = None
        os.environ.setdefault(_ALLOCATOR_VARIABLE, ALLOCATOR)  # inherited by the workers

    def __enter__(self) -> _RestartingWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._process is not None:  # interrupted: do not wait for the current case
            self._process.kill()
        self._close()

    @property
    def start_seconds(self) -> float:
        return _START_SECONDS if self._process is None else 0.0

    def measure(self, case: GridCase, limit_seconds: float) -> GridRow:
        if self._process is None:
            self._number += 1
            name = f"memory-grid-{self._number}"
            self._process = MeasurementProcess(WORKER_MODULE, GridSpec(), self._folder, name)
        began = time.monotonic()
        self._process.send(case.model_dump_json())
        try:
            reply = CaseReply.model_validate_json(self._process.read(limit_seconds))
        except MeasurementFailedError as error:
            self._process.kill()
            self._close()
            return GridRow(
                case=case.name,
                model=case.base,
                error=str(error)[:_MAX_ERROR_CHARS],
                case_seconds=time.monotonic() - began,
            )
        if not reply.can_continue:
            self._report("the worker cannot continue: the next case starts in a new one")
            self._close()
        return reply.row

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
