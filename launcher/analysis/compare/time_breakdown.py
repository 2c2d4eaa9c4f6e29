"""Time breakdown of a run by activity."""

from __future__ import annotations

import math

from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.model import Share
from launcher.analysis.compare.summary_metrics import compute_wall_clock
from launcher.core import metrics

PARTS: tuple[str, ...] = (
    "training",
    "data wait",
    "evaluation",
    "checkpoints",
    "compiling",
    "start",
    "restarts",
    "skipped steps",
    "other",
)
_MIN_OTHER = 0.001  # of the total; less is rounding
_RECORDED: dict[str, str] = {
    "data wait": metrics.DATA_SECONDS,
    "evaluation": metrics.EVALUATION_SECONDS,
    "checkpoints": metrics.CHECKPOINT_SECONDS,
    "compiling": metrics.COMPILE_SECONDS,
    "start": metrics.START_SECONDS,
    "restarts": metrics.RESTART_SECONDS,
    "skipped steps": metrics.SKIPPED_SECONDS,
}


def make_shares(run: RunFacts) -> tuple[tuple[Share, ...], bool]:
    """Return the parts with nonzero time in a fixed order, and whether the run recorded them."""
    recorded = {part: value for part, name in _RECORDED.items() if (value := run.last(name)) is not None}
    seconds = dict(recorded) if recorded else _sum_parts(run)
    total = compute_wall_clock(run)
    if recorded:
        goodput = run.last(metrics.GOODPUT)
        inside = math.fsum(recorded.get(part, 0.0) for part in ("data wait", "skipped steps"))  # part of the step time
        trained = total * goodput if total is not None and goodput is not None else _trained_seconds(run) - inside
        seconds["training"] = max(0.0, trained)
    if total is not None and seconds:
        rest = total - math.fsum(seconds.values())
        if rest > _MIN_OTHER * total:
            seconds["other"] = rest
    shares = tuple(
        Share(part=part, seconds=float(f"{seconds[part]:.6g}"))
        for part in PARTS
        if seconds.get(part, 0.0) > 0 and math.isfinite(seconds[part])
    )
    return shares, bool(recorded)


def _sum_parts(run: RunFacts) -> dict[str, float]:
    """Sum steps and evaluations of a run that recorded no breakdown."""
    trained = _trained_seconds(run)
    evaluated = _sum(run, metrics.EVAL_SECONDS) + _sum(run, metrics.TASK_SECONDS)
    waited = _waited_seconds(run)
    seconds = {"training": trained - waited, "data wait": waited, "evaluation": evaluated}
    return {part: value for part, value in seconds.items() if value > 0}


def _waited_seconds(run: RunFacts) -> float:
    """Return the data wait of the device if measured, else of the host, which is the same on a CPU."""
    steps, shares, hosts = (
        _by_step(run, name) for name in (metrics.STEP_SECONDS, metrics.DATA_WAIT_SHARE, metrics.DATA_WAIT_SECONDS)
    )
    waits = ((seconds, shares[at] * seconds if at in shares else hosts.get(at, 0.0)) for at, seconds in steps.items())
    return math.fsum(min(seconds, wait) for seconds, wait in waits)


def _by_step(run: RunFacts, metric: str) -> dict[int, float]:
    column = run.column(metric)
    return {step: value for step, value in zip(column.steps, column.values, strict=True) if math.isfinite(value)}


def _trained_seconds(run: RunFacts) -> float:
    return _sum(run, metrics.STEP_SECONDS)


def _sum(run: RunFacts, metric: str) -> float:
    return math.fsum(run.column(metric).finite)
