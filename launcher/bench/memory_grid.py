"""Runs the memory grid in pieces: what is measured is skipped, what would not end in time is not begun.

All cases run in one child process, which is what makes it quick. Where it dies, or says that it can no longer be
trusted, the next case begins in a new one.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.bench.children import Child, ChildFailedError
from launcher.bench.memory_cases import GridCase
from launcher.bench.memory_rows import ALLOCATOR, GridRow, append_row, load_rows
from launcher.errors import LauncherError
from launcher.units import bytes_to_gib
from launcher.values import Frozen

CHILD_MODULE = "launcher.training.bench.memory"
_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"  # as trainings have it
# What a case takes where none like it is measured: seconds for each billion parameters, and beside.
_EAGER_SECONDS, _COMPILED_SECONDS, _SECONDS_PER_BILLION = 8.0, 40.0, 4.0
_START_SECONDS = 25.0  # of a child: importing torch, waking the GPU
_MARGIN = 1.3  # of what a case like it took
_LEAST_LIMIT_SECONDS, _LIMIT_FACTOR = 240.0, 5.0
_LARGE_BASES = {"tiny": 0.0, "0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2}
_SHOWN_ERROR = 600

Say = Callable[[str], None]


class GridSpec(Frozen):
    """What a measuring process is told before its first case: how a case is stepped."""

    warm_steps: int = 3  # the first compiles, and the optimizer makes its state
    timed_steps: int = 3

    @property
    def num_steps(self) -> int:
        return self.warm_steps + self.timed_steps


class Answer(Frozen):
    row: GridRow
    goes_on: bool  # False: the process is at its end, or what it measures next would be wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Of the cases that were asked for."""

    num_measured: int
    num_left_out: int
    failed: tuple[str, ...]
    num_left: int
    next_seconds: float | None  # that the quickest of those needs


def run_grid(cases: Sequence[GridCase], out: Path, minutes: float, say: Say, *, again: bool = False) -> Progress:
    """Until all are tried, or the time is over. `again`: those that failed, too."""
    deadline = time.monotonic() + 60 * minutes
    pending = find_pending(cases, load_rows(out), again=again)
    with tempfile.TemporaryDirectory(prefix="memory-grid-") as folder, _Worker(Path(folder), say) as worker:
        while pending:
            seen = load_rows(out)
            case = _find_next(pending, seen, deadline - time.monotonic() - worker.start_seconds)
            if case is None:
                break
            pending.remove(case)
            row = worker.measure(case, _limit_seconds(case, seen))
            append_row(out, row)
            say(f"{len(cases) - len(pending)}/{len(cases)}  {describe_row(row)}")
    return make_progress(cases, load_rows(out), pending)


def find_pending(cases: Sequence[GridCase], seen: Sequence[GridRow], *, again: bool = False) -> list[GridCase]:
    tried = {row.case for row in seen if row.error is None or not again}
    return [case for case in cases if case.name not in tried]


def make_progress(cases: Sequence[GridCase], seen: Sequence[GridRow], pending: Sequence[GridCase]) -> Progress:
    names = {case.name for case in cases}
    rows = [row for row in seen if row.case in names]
    return Progress(
        num_measured=sum(row.is_measured for row in rows),
        num_left_out=sum(row.left_out is not None for row in rows),
        failed=tuple(row.case for row in rows if row.error is not None),
        num_left=len(pending),
        next_seconds=min((expect_seconds(case, seen) for case in pending), default=None),
    )


def expect_seconds(case: GridCase, seen: Sequence[GridRow]) -> float:
    """The longest of its base, compiled as it is; where there is none, a guess."""
    ways = ("-compiled", "-graphed") if case.compiled else ("-eager",)
    alike = [row.case_seconds for row in seen if row.model == case.base and any(way in row.case for way in ways)]
    known = [seconds for seconds in alike if seconds is not None]
    if known:
        return _MARGIN * max(known)
    return (_COMPILED_SECONDS if case.compiled else _EAGER_SECONDS) + _SECONDS_PER_BILLION * _LARGE_BASES[case.base]


def _find_next(pending: Sequence[GridCase], seen: Sequence[GridRow], seconds: float) -> GridCase | None:
    """The first that fits into the time that is left."""
    return next((case for case in pending if expect_seconds(case, seen) <= seconds), None)


def _limit_seconds(case: GridCase, seen: Sequence[GridRow]) -> float:
    return _START_SECONDS + max(_LEAST_LIMIT_SECONDS, _LIMIT_FACTOR * expect_seconds(case, seen))


def describe_row(row: GridRow) -> str:
    if row.left_out is not None:
        return f"{row.case}: left out: {row.left_out}"
    if row.error is not None:
        return f"{row.case}: failed: {row.error.splitlines()[0]}"
    told = [f"{row.tokens_per_second:,.0f} tokens/s" if row.tokens_per_second else "", f"{row.case_seconds:.0f} s"]
    if row.peak_allocated_bytes and row.predicted_bytes:
        error = row.predicted_bytes / row.peak_allocated_bytes - 1
        told.insert(0, f"{bytes_to_gib(row.peak_allocated_bytes):.2f} GiB, predicted {100 * error:+.1f} %")
    return f"{row.case}: {', '.join(filter(None, told))}"


class _Worker:
    """The child that measures; a new one where the last is gone."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder, self._say, self._number = folder, say, 0
        self._child: Child | None = None
        os.environ.setdefault(_ALLOCATOR_VARIABLE, ALLOCATOR)  # children inherit it

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._child is not None:  # whoever stops us does not want to wait for a case
            self._child.kill()
        self._end()

    @property
    def start_seconds(self) -> float:
        return _START_SECONDS if self._child is None else 0.0

    def measure(self, case: GridCase, limit_seconds: float) -> GridRow:
        if self._child is None:
            self._number += 1
            self._child = Child(CHILD_MODULE, GridSpec(), self._folder, f"memory-grid-{self._number}")
        began = time.monotonic()
        self._child.tell(case.model_dump_json())
        try:
            answer = Answer.model_validate_json(self._child.read(limit_seconds))
        except ChildFailedError as error:
            self._child.kill()
            self._end()
            return GridRow(
                case=case.name, model=case.base, error=_shorten(error), case_seconds=time.monotonic() - began
            )
        if not answer.goes_on:
            self._say("this process cannot go on: the next case begins in a new one")
            self._end()
        return answer.row

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.end()


def _shorten(error: LauncherError) -> str:
    return str(error)[:_SHOWN_ERROR]
