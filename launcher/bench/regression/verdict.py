"""Compares two finished runs and their evaluations: speed, memory, loss, every check, and the quality gate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from launcher.core import metrics
from launcher.core.metrics import METRICS_BY_NAME
from launcher.judges.gate import GateVerdict, check_change
from launcher.judges.results import CheckResult, EvalResult, compare_results
from launcher.runs.record import RunRecord

FigureKind = Literal["count", "rate", "seconds", "GiB", "share", "loss"]
_MAX_ROW_DIFFERENCE = 0.05  # an incomplete last step and rounding make less
_Compute = Callable[[RunRecord], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number of both runs; None if a run does not have it."""

    key: str
    title: str
    kind: FigureKind
    old: float | None
    new: float | None

    @property
    def ratio(self) -> float | None:
        """New over old."""
        return self.new / self.old if self.old and self.new is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckChange:
    """A check of the judge in both evaluations."""

    title: str
    is_main: bool
    old: CheckResult
    new: CheckResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The complete comparison."""

    figures: tuple[Figure, ...]
    checks: tuple[CheckChange, ...]
    num_rows: int
    gate: GateVerdict
    notes: tuple[str, ...]

    @property
    def speedup(self) -> float | None:
        """Ratio of rows/s, which ignores padding."""
        return next((figure.ratio for figure in self.figures if figure.key == metrics.SAMPLES_PER_SECOND), None)


def make_verdict(
    records: tuple[RunRecord, RunRecord],
    results: tuple[EvalResult, EvalResult],
    max_regression: float,
    cpu_seconds: tuple[float, float] | None = None,
) -> Verdict:
    """Compare; every pair is the old run's and the new run's."""
    change, warnings = compare_results(*results)
    return Verdict(
        figures=tuple(_make_figures(*records, cpu_seconds)),
        checks=tuple(_pair_checks(*results)),
        num_rows=len(results[1].answers),
        gate=check_change(change, max_regression),
        notes=(*_list_notes(records), *warnings),
    )


def _make_figures(old: RunRecord, new: RunRecord, cpu_seconds: tuple[float, float] | None) -> Iterator[Figure]:
    for key, title, kind, compute in _FIGURES:
        figure = Figure(key=key, title=title, kind=kind, old=compute(old), new=compute(new))
        if figure.old is not None or figure.new is not None:
            yield figure
        if key == metrics.TOTAL_SECONDS and cpu_seconds is not None and new.plan.hardware.gpu is None:
            # On CPUs; hardly affected by other load. Includes startup and evaluation.
            old_seconds, new_seconds = cpu_seconds
            yield Figure(key="cpu_seconds", title="CPU time", kind="seconds", old=old_seconds, new=new_seconds)


def _pair_checks(old: EvalResult, new: EvalResult) -> Iterator[CheckChange]:
    old_checks = {check.name: check for check in old.checks}
    for check in new.checks:
        if check.name in old_checks:
            is_main = check.name == new.main_check
            yield CheckChange(title=check.title, is_main=is_main, old=old_checks[check.name], new=check)


def _list_notes(records: tuple[RunRecord, RunRecord]) -> Iterator[str]:
    for name, record in zip(("old", "new"), records, strict=True):
        if record.outcome is not None and record.outcome.ended_because:
            yield f"{name}: {record.outcome.ended_because}"
    old, new = (_count_rows(record) for record in records)
    if old and new and abs(new / old - 1) > _MAX_ROW_DIFFERENCE:
        yield f"the old run trained {old:,.0f} rows, the new one {new:,.0f}: their quality is not comparable"


def _count_rows(record: RunRecord) -> float | None:
    """Count the rows trained, from the metrics of the steps."""
    counts = [
        round(rate * seconds)
        for row in record.steps
        if (rate := row.get(metrics.SAMPLES_PER_SECOND)) is not None
        and (seconds := row.get(metrics.STEP_SECONDS)) is not None
        and math.isfinite(rate * seconds)
    ]
    return float(sum(counts)) if counts else None


def _column(record: RunRecord, name: str) -> list[float]:
    return [value for row in record.rows if (value := row.get(name)) is not None and math.isfinite(value)]


def _median(name: str) -> _Compute:
    def compute(record: RunRecord) -> float | None:
        values = _column(record, name)
        return statistics.median(values) if values else None

    return compute


def _maximum(name: str) -> _Compute:
    return lambda record: max(_column(record, name), default=None)


def _step_seconds(record: RunRecord) -> float | None:
    seconds = _column(record, metrics.STEP_SECONDS)
    return math.fsum(seconds) if seconds else None


def _eval_loss(record: RunRecord) -> float | None:
    """Return the loss of the saved weights, which are evaluated: the best ones, or the last."""
    losses = _column(record, metrics.EVAL_LOSS)
    if not losses:
        return None
    return min(losses) if record.plan.schedule.load_best_model_at_end else losses[-1]


def _count_steps(record: RunRecord) -> float | None:
    return float(len(record.steps)) or None


def _title(name: str) -> str:
    return METRICS_BY_NAME[name].title


_FIGURES: tuple[tuple[str, str, FigureKind, _Compute], ...] = (
    ("rows", "rows trained", "count", _count_rows),
    ("steps", "steps", "count", _count_steps),
    *(
        (name, _title(name), "rate", _median(name))
        for name in (metrics.SAMPLES_PER_SECOND, metrics.TOKENS_PER_SECOND, metrics.TRAINED_TOKENS_PER_SECOND)
    ),
    ("step_seconds", "all steps", "seconds", _step_seconds),
    (metrics.TOTAL_SECONDS, "complete run", "seconds", _maximum(metrics.TOTAL_SECONDS)),
    (metrics.GPU_UTILIZATION, _title(metrics.GPU_UTILIZATION), "share", _median(metrics.GPU_UTILIZATION)),
    (metrics.PEAK_ALLOCATED_GIB, _title(metrics.PEAK_ALLOCATED_GIB), "GiB", _maximum(metrics.PEAK_ALLOCATED_GIB)),
    (metrics.EVAL_LOSS, _title(metrics.EVAL_LOSS), "loss", _eval_loss),
)
