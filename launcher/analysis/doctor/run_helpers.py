"""Helpers for the checks of a run: steps after warm-up, slow steps, trends, and commands that resume or retrain it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from launcher.analysis.doctor.findings import Reporter
from launcher.analysis.report.render import format_command
from launcher.core.errors import InputError
from launcher.core.metrics import STEP_SECONDS, TOKENS_PER_SECOND, StepMetrics, find_values
from launcher.core.run_paths import format_resume_command
from launcher.plan.model import Plan
from launcher.request.request import Request, load_request
from launcher.runs.record import RunRecord

report_run = Reporter("run")

# The first steps of a process compile, fill caches and raise clocks.
_WARM_UP, _WARM_UP_SHARE = 5, 4
ENOUGH_STEPS = 8  # enough for a median
_MAX_STEPS = 2000  # the last ones of a long run: recent, and fast to analyze
_SLOW = 1.5  # times the usual duration
_REGULAR = 0.8  # share of the due steps that are slow, and of the slow steps that are due
_MIN_REPEATS = 5
_MIN_PERIOD = 2
_LONGER = 4  # times an interval


def select_warm_steps(record: RunRecord) -> tuple[StepMetrics, ...]:
    """Return a run's steps without the first five of each attempt, which are slow; short runs lose fewer than five."""
    steps = record.steps
    starts = {0, *(attempt.from_step for attempt in (record.outcome.attempts if record.outcome else ()))}
    warm_up = min(_WARM_UP, len(steps) // _WARM_UP_SHARE)
    cold = {start + offset for start in starts for offset in range(1, warm_up + 1)}
    return tuple(step for step in steps if step.step not in cold)


def select_recent_steps(record: RunRecord) -> tuple[StepMetrics, ...]:
    """Return the steps of the last attempt, as earlier ones may have had other hardware; all steps if it has few."""
    steps = select_warm_steps(record)
    begun = record.outcome.attempts[-1].from_step if record.outcome and record.outcome.attempts else 0
    last = tuple(step for step in steps if step.step > begun)
    return (last if len(last) >= ENOUGH_STEPS else steps)[-_MAX_STEPS:]


def compute_usual(steps: Sequence[StepMetrics], name: str, *, is_low_good: bool) -> float | None:
    """Return the value that the best third of the steps reach: the median may be that of a slow step."""
    values = sorted(find_values(steps, name), reverse=not is_low_good)
    return values[len(values) // 3] if values else None


def find_slow_steps(steps: Sequence[StepMetrics], times: float = _SLOW) -> list[StepMetrics]:
    """Return steps that took long and had low tokens/s; a step that only has more tokens is not slow."""
    seconds = compute_usual(steps, STEP_SECONDS, is_low_good=True)
    rate = compute_usual(steps, TOKENS_PER_SECOND, is_low_good=False)
    if seconds is None or rate is None:
        return []

    def is_slow(step: StepMetrics) -> bool:
        took, reached = step.get(STEP_SECONDS), step.get(TOKENS_PER_SECOND)
        return took is not None and reached is not None and took > times * seconds and reached * times < rate

    return [step for step in steps if is_slow(step)]


def compute_lost_share(steps: Sequence[StepMetrics], slow: Sequence[StepMetrics]) -> float:
    """Return the time by which slow steps exceeded the usual duration, as a share of the time of all steps."""
    seconds = compute_usual(steps, STEP_SECONDS, is_low_good=True)
    total = sum(find_values(steps, STEP_SECONDS))
    if not seconds or not total:
        return 0.0
    return sum(value - seconds for value in find_values(slow, STEP_SECONDS)) / total


def find_period(numbers: Sequence[int], slow: Collection[int]) -> int | None:
    """Return how many steps apart regular slow steps are; None if they are irregular or fewer than five."""
    if len(slow) < _MIN_REPEATS:
        return None
    for period in range(_MIN_PERIOD, len(numbers) // _MIN_REPEATS + 1):
        phase, hits = Counter(number % period for number in slow).most_common(1)[0]
        if hits >= max(_MIN_REPEATS, _REGULAR * len(slow)):
            num_due = sum(number % period == phase for number in numbers)
            if hits >= _REGULAR * num_due:
                return period
    return None


def format_steps(steps: Sequence[StepMetrics]) -> str:
    """Format the numbers of the first few steps for a message."""
    shown = ", ".join(str(step.step) for step in steps[:4])
    return f"step{'s' if len(steps) > 1 else ''} {shown}{', …' if len(steps) > 4 else ''}"


def compute_thirds(values: Sequence[float]) -> list[float]:
    """Return the medians of the first, the middle and the last third."""
    size = len(values) / 3
    return [median(values[round(size * index) : round(size * (index + 1))]) for index in range(3)]


def rerun_command(record: RunRecord, *settings: str) -> str:
    """Return the command that resumes a run with other settings, or trains it again if it has finished."""
    status = None if record.outcome is None else record.outcome.status
    if status == "done":
        return train_command(record, *settings)
    stop = "stop it, which saves a checkpoint; then " if status == "running" else ""
    return stop + " ".join((resume_command(record), *_format_overrides(settings)))


def train_command(record: RunRecord, *settings: str) -> str:
    """Return the command that trains a new run with other settings, as settings that affect learning require.

    It has all flags of this run.
    """
    request = _load_request(record)
    changed = {setting.partition("=")[0] for setting in settings}
    kept = (override for override in request.overrides if override.partition("=")[0] not in changed)
    return format_command(replace(request, overrides=(*kept, *settings)))


def prepare_command(record: RunRecord) -> str:
    """Return the command that shows how the rows of a run's expert are read."""
    return shlex.join(("launcher", "prepare", _load_request(record).expert))


def _load_request(record: RunRecord) -> Request:
    try:
        return load_request(record.paths.request)
    except InputError:  # written by another version, or started without `launcher train`
        return Request(expert=record.plan.expert)


def resume_command(record: RunRecord) -> str:
    """Return the command that resumes the run."""
    return format_resume_command(record.paths.root)


def _format_overrides(settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"--set {shlex.quote(setting)}" for setting in settings)


def suggest_longer_interval(record: RunRecord, name: Literal["save", "eval"]) -> str:
    """Return the command that makes a save or eval interval four times as long, or why a short run needs no change."""
    schedule = record.plan.schedule
    interval = schedule.save_every_steps if name == "save" else schedule.evaluate_every_steps
    total = schedule.num_steps if record.outcome is None else record.outcome.num_steps
    if interval is not None and total is not None and _LONGER * interval > total:
        return f"nothing to change: this run has only {total:,} steps; use longer intervals in longer runs"
    set_interval = set_save_interval if name == "save" else set_eval_interval
    return rerun_command(record, *set_interval(record.plan, _LONGER))


def set_save_interval(plan: Plan, times: float) -> tuple[str, ...]:
    """Return settings that multiply the save interval, and the eval interval too if the best checkpoint is kept."""
    return _set_interval(plan, ("save", "eval") if plan.schedule.load_best_model_at_end else ("save",), times)


def set_eval_interval(plan: Plan, times: float) -> tuple[str, ...]:
    """Return settings that multiply the eval interval, and the save interval too if the best checkpoint is kept."""
    return _set_interval(plan, ("eval", "save") if plan.schedule.load_best_model_at_end else ("eval",), times)


def _set_interval(plan: Plan, names: tuple[str, ...], times: float) -> tuple[str, ...]:
    schedule = plan.schedule
    is_saving = names[0] == "save"
    steps = schedule.save_every_steps if is_saving else schedule.evaluate_every_steps
    epochs = (schedule.save_every_epochs if is_saving else schedule.evaluate_every_epochs) or 1.0
    kind = "steps" if steps is not None else "epoch"
    value = f"steps={max(1, round(steps * times))}" if steps is not None else f"epochs={epochs * times:g}"
    strategies = {"save": "save_strategy", "eval": "evaluation_strategy"}
    return tuple(
        setting
        for name in names
        for setting in (f"training.config.{strategies[name]}={kind}", f"training.config.{name}_{value}")
    )
