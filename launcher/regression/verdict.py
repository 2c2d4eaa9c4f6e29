"""Two runs that are done and their evaluations -> what changed: speed, memory, loss, every check, and the gate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from launcher import metrics
from launcher.metrics import METRICS_BY_NAME
from launcher.quality.gate import GateVerdict, judge_change
from launcher.quality.results import CheckResult, EvalResult, compare_results
from launcher.record import RunRecord

FigureKind = Literal["count", "rate", "seconds", "GiB", "share", "loss"]
_ROWS_ALIKE = 0.05  # a last step that is not full, and rounding, make less
_Compute = Callable[[RunRecord], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of both runs; None where a run has not got it."""

    key: str
    title: str
    kind: FigureKind
    old: float | None
    new: float | None

    @property
    def ratio(self) -> float | None:
        return self.new / self.old if self.old and self.new is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckChange:
    title: str
    is_main: bool
    old: CheckResult
    new: CheckResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    figures: tuple[Figure, ...]
    checks: tuple[CheckChange, ...]
    num_asked: int
    gate: GateVerdict
    notes: tuple[str, ...]

    @property
    def speedup(self) -> float | None:
        """In rows: that is what is to be trained, and no padding counts."""
        return next((figure.ratio for figure in self.figures if figure.key == metrics.SAMPLES_PER_SECOND), None)


def make_verdict(
    records: tuple[RunRecord, RunRecord],
    results: tuple[EvalResult, EvalResult],
    max_drop: float,
    cpu_seconds: tuple[float, float] | None = None,
) -> Verdict:
    """Of the old run and the new one, in this order."""
    change, warnings = compare_results(*results)
    return Verdict(
        figures=tuple(_make_figures(*records, cpu_seconds)),
        checks=tuple(_pair_checks(*results)),
        num_asked=len(results[1].answers),
        gate=judge_change(change, max_drop),
        notes=(*_find_notes(records), *warnings),
    )


def _make_figures(old: RunRecord, new: RunRecord, cpu_seconds: tuple[float, float] | None) -> Iterator[Figure]:
    for key, title, kind, compute in _KINDS:
        figure = Figure(key=key, title=title, kind=kind, old=compute(old), new=compute(new))
        if figure.old is not None or figure.new is not None:
            yield figure
        if key == metrics.TOTAL_SECONDS and cpu_seconds is not None and new.plan.hardware.gpu is None:
            yield _make_cpu_figure(*cpu_seconds)


def _make_cpu_figure(old: float, new: float) -> Figure:
    """Where the CPU trains: what else runs there hardly changes it. Start and evaluation are included."""
    return Figure(key="cpu_seconds", title="CPU time of the whole run", kind="seconds", old=old, new=new)


def _pair_checks(old: EvalResult, new: EvalResult) -> Iterator[CheckChange]:
    before = {check.name: check for check in old.checks}
    for check in new.checks:
        if check.name in before:
            yield CheckChange(
                title=check.title, is_main=check.name == new.main_check, old=before[check.name], new=check
            )


def _find_notes(records: tuple[RunRecord, RunRecord]) -> Iterator[str]:
    for name, record in zip(("old", "new"), records, strict=True):
        if record.outcome is not None and record.outcome.ended_because:
            yield f"{name}: {record.outcome.ended_because}"
    old, new = (_count_rows(record) for record in records)
    if old and new and abs(new / old - 1) > _ROWS_ALIKE:
        yield f"{old:,.0f} rows were trained by the old one, {new:,.0f} by the new one: their quality hardly compares"


def _count_rows(record: RunRecord) -> float | None:
    """As each step counted them, not as planned."""
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


def _greatest(name: str) -> _Compute:
    return lambda record: max(_column(record, name), default=None)


def _step_seconds(record: RunRecord) -> float | None:
    seconds = _column(record, metrics.STEP_SECONDS)
    return math.fsum(seconds) if seconds else None


def _held_out_loss(record: RunRecord) -> float | None:
    """Of the weights that were saved, and so were asked: the best ones, or the last."""
    losses = _column(record, metrics.EVAL_LOSS)
    if not losses:
        return None
    return min(losses) if record.plan.schedule.load_best_model_at_end else losses[-1]


def _count_steps(record: RunRecord) -> float | None:
    return float(len(record.steps)) or None


def _title(name: str) -> str:
    return METRICS_BY_NAME[name].title


_KINDS: tuple[tuple[str, str, FigureKind, _Compute], ...] = (
    ("rows", "rows trained", "count", _count_rows),
    ("steps", "steps", "count", _count_steps),
    *(
        (name, _title(name), "rate", _median(name))
        for name in (metrics.SAMPLES_PER_SECOND, metrics.TOKENS_PER_SECOND, metrics.TRAINED_TOKENS_PER_SECOND)
    ),
    ("step_seconds", "all steps", "seconds", _step_seconds),
    (metrics.TOTAL_SECONDS, "the whole run", "seconds", _greatest(metrics.TOTAL_SECONDS)),
    (metrics.GPU_UTILIZATION, _title(metrics.GPU_UTILIZATION), "share", _median(metrics.GPU_UTILIZATION)),
    (metrics.PEAK_ALLOCATED_GIB, _title(metrics.PEAK_ALLOCATED_GIB), "GiB", _greatest(metrics.PEAK_ALLOCATED_GIB)),
    (metrics.EVAL_LOSS, _title(metrics.EVAL_LOSS), "loss", _held_out_loss),
)
