"""Where the seconds of a run went: training, waiting, evaluating, saving, compiling, starting, starting again."""

from __future__ import annotations

import math

from launcher import metrics
from launcher.compare.facts import RunFacts
from launcher.compare.figures import wall_clock
from launcher.compare.model import Share

PARTS: tuple[str, ...] = (
    "training",
    "data wait",
    "evaluation",
    "checkpoints",
    "compiling",
    "start",
    "restarts",
    "steps passed over",
    "rest",
)
_LEAST_REST = 0.001  # of all; less is rounding
_RECORDED: dict[str, str] = {
    "data wait": metrics.DATA_SECONDS,
    "evaluation": metrics.EVALUATION_SECONDS,
    "checkpoints": metrics.CHECKPOINT_SECONDS,
    "compiling": metrics.COMPILE_SECONDS,
    "start": metrics.START_SECONDS,
    "restarts": metrics.RESTART_SECONDS,
    "steps passed over": metrics.SKIPPED_SECONDS,
}


def make_shares(run: RunFacts) -> tuple[tuple[Share, ...], bool]:
    """The parts that took time, in a fixed order; and whether the run recorded them itself."""
    recorded = {part: value for part, name in _RECORDED.items() if (value := run.last(name)) is not None}
    seconds = dict(recorded) if recorded else _add_up(run)
    total = wall_clock(run)
    if recorded:
        goodput = run.last(metrics.GOODPUT)
        inside = math.fsum(recorded.get(part, 0.0) for part in ("data wait", "steps passed over"))  # of steps
        trained = total * goodput if total is not None and goodput is not None else _trained_seconds(run) - inside
        seconds["training"] = max(0.0, trained)
    if total is not None and seconds:
        rest = total - math.fsum(seconds.values())
        if rest > _LEAST_REST * total:
            seconds["rest"] = rest
    told = tuple(
        Share(part=part, seconds=float(f"{seconds[part]:.6g}"))
        for part in PARTS
        if seconds.get(part, 0.0) > 0 and math.isfinite(seconds[part])
    )
    return told, bool(recorded)


def _add_up(run: RunFacts) -> dict[str, float]:
    """Of runs that did not record it: what their steps and evaluations tell."""
    trained = _trained_seconds(run)
    evaluated = _sum(run, metrics.EVAL_SECONDS) + _sum(run, metrics.TASK_SECONDS)
    waited = _waited_seconds(run)
    seconds = {"training": trained - waited, "data wait": waited, "evaluation": evaluated}
    return {part: value for part, value in seconds.items() if value > 0}


def _waited_seconds(run: RunFacts) -> float:
    """Of the device, where that was measured; else of the host, which on a CPU is the same."""
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
