"""Check the status of a run: running, killed, hanging, failed, restarted; and its goodput."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.run_helpers import (
    report_run,
    rerun_command,
    resume_command,
    select_warm_steps,
    set_eval_interval,
    set_save_interval,
)
from launcher.core import metrics
from launcher.core.file_lock import is_locked
from launcher.core.metrics import LOST_SECONDS, METRICS_BY_NAME, find_values
from launcher.core.run_paths import RunPaths
from launcher.core.units import format_duration, format_percent
from launcher.runs.record import Outcome, RunRecord, compute_median, load_record, seconds_between

# A run hangs if it makes no step for this many usual steps and this many seconds.
_STUCK_STEPS, _STUCK_SECONDS = 20, 120.0
_LONG_START_SECONDS = 1800.0
_FRESH_SECONDS = 30.0  # locks on some network disks are visible on their own node only
_LONG_RUN_SECONDS = 600.0  # in shorter runs the start is naturally a large part
_LOW_GOODPUT, _BAD_GOODPUT = 0.8, 0.5
_MAX_ERROR_LENGTH = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Record of a run, and whether it is alive."""

    record: RunRecord
    is_trained: bool | None  # a process holds its lock; None: unknown on this file system
    idle_seconds: float | None  # since its last metrics; None: none yet
    age_seconds: float | None  # since it was started


def probe_run(paths: RunPaths) -> RunState:
    """Load the record of a run and probe whether it is alive."""
    record = load_record(paths)
    try:
        idle: float | None = max(0.0, time.time() - paths.metrics.stat().st_mtime)
    except OSError:
        idle = None
    age, outcome = None, record.outcome
    if outcome is not None:
        began = outcome.attempts[-1].started_at if outcome.attempts else outcome.started_at
        age = seconds_between(began, datetime.now(UTC).isoformat())
    return RunState(record=record, is_trained=is_locked(paths.lock), idle_seconds=idle, age_seconds=age)


def check_status(facts: RunState) -> Iterator[Finding]:
    """Check the status of a run, its restarts, OOM fallbacks and goodput."""
    record = facts.record
    yield _describe_status(facts)
    if record.outcome is not None:
        yield from _check_restarts(record, record.outcome)
        yield from _check_oom_fallbacks(record, record.outcome)
        yield from _check_goodput(record, _get_goodput(record))


def _describe_status(facts: RunState) -> Finding:
    record, outcome = facts.record, facts.record.outcome
    if outcome is None:
        start = resume_command(record)
        return report_run.note("status", "planned, but never started", "there is nothing to check", start)
    done = f"{max(outcome.steps_done, _last_step(record)):,} of {outcome.num_steps or 0:,} steps"
    if outcome.status == "running":
        return _describe_running(facts, done)
    if outcome.status in ("failed", "crashed"):
        error = " ".join(outcome.error.split())[:_MAX_ERROR_LENGTH] or f"exit code {outcome.exit_code}"
        why = "it ended early; its checkpoints are kept"
        return report_run.problem("status", f"{outcome.status} after {done}: {error}", why, resume_command(record))
    if outcome.status == "stopped":
        return report_run.note("status", f"stopped after {done}", "a stop was requested", resume_command(record))
    return report_run.ok("status", f"done, {done}{f' ({outcome.ended_because})' if outcome.ended_because else ''}")


def _last_step(record: RunRecord) -> int:
    return record.steps[-1].step if record.steps else 0


def _describe_running(facts: RunState, done: str) -> Finding:
    record = facts.record
    assert record.outcome is not None
    if facts.is_trained is False and (facts.idle_seconds or 0.0) < _FRESH_SECONDS and record.steps:
        found = f"{done}, the last one just now, but no process on this machine trains it"
        return report_run.note(
            "status",
            found,
            "it is still training on another node, or was killed a moment ago",
            "check again in a minute",
        )
    if facts.is_trained is False:
        return report_run.problem(
            "status",
            f"its status is running, after {done}, but no process trains it",
            "it was killed: by a reboot, the kernel's OOM killer (dmesg), or a scheduler",
            resume_command(record),
        )
    usual = compute_median(select_warm_steps(record), metrics.STEP_SECONDS)
    if usual is None or facts.idle_seconds is None:
        age = facts.age_seconds or 0.0
        if age > _LONG_START_SECONDS:
            found = f"started {format_duration(age)} ago, without a step"
            return report_run.problem(
                "status", found, "it hangs before its first step", f"tail {record.paths.console_log}"
            )
        return report_run.ok("status", "starting")
    evaluation = max(find_values(record.evaluations, metrics.EVAL_SECONDS), default=0.0)
    evaluation += max(find_values(record.rows, metrics.TASK_SECONDS), default=0.0)
    patience = max(_STUCK_SECONDS, _STUCK_STEPS * usual + 2 * evaluation)
    if facts.idle_seconds > patience:
        return report_run.problem(
            "status",
            f"no step for {format_duration(facts.idle_seconds)}, after {done}; a step takes {usual:.2g} s",
            f"it hangs; after {record.plan.guards.hang_seconds} s the run ends and logs the stack of each rank",
            f"tail {record.paths.console_log}; py-spy dump --pid {record.outcome.pid}",
        )
    left = (record.outcome.num_steps or 0) - _last_step(record)
    soon = f", about {format_duration(left * usual)} left" if left > 0 else ""
    return report_run.ok("status", f"running, {done}{soon}")


def _check_restarts(record: RunRecord, outcome: Outcome) -> Iterator[Finding]:
    if len(outcome.attempts) < 2:
        return
    pairs = [*pairwise(outcome.attempts)]
    silent = sum(attempt.ended_at is None for attempt, _ in pairs)
    repeated = sum(max(0, (attempt.steps_done or 0) - following.from_step) for attempt, following in pairs)
    count = f"{silent} of them killed" if silent else f"{repeated} step{'s'[: repeated != 1]} repeated"
    why = "stopped and resumed from its last step: nothing was trained twice"
    if silent:
        why = "steps after the last checkpoint were repeated; a killed attempt does not record how many"
    elif repeated:
        why = "steps after the last checkpoint were repeated"
    yield report_run.note(
        "restarts",
        f"{len(outcome.attempts)} starts, {count}",
        why,
        f"{record.paths.logs} shows why each ended" if silent else "",
    )


def _check_oom_fallbacks(record: RunRecord, outcome: Outcome) -> Iterator[Finding]:
    if not outcome.oom_fallbacks:
        return
    left = f"next: {record.plan.oom_fallbacks[0].action}" if record.plan.oom_fallbacks else "none left"
    yield report_run.note(
        "out of memory",
        f"{len(outcome.oom_fallbacks)} OOM fallbacks used: {', '.join(outcome.oom_fallbacks)}; {left}",
        "training is slower, with the same result; later plans on this GPU use less memory",
    )


def _get_goodput(record: RunRecord) -> Mapping[str, float]:
    if record.outcome is not None and record.outcome.goodput:
        return record.outcome.goodput
    recorded = [row.values for row in record.rows if metrics.GOODPUT in row.values]
    return recorded[-1] if recorded else {}


def _check_goodput(record: RunRecord, goodput: Mapping[str, float]) -> Iterator[Finding]:
    share = goodput.get(metrics.GOODPUT)
    seconds = goodput.get(metrics.TOTAL_SECONDS) or sum(find_values(record.steps, metrics.STEP_SECONDS))
    if share is None or seconds < _LONG_RUN_SECONDS or share >= _LOW_GOODPUT:
        return
    losses = sorted(((goodput.get(name, 0.0), name) for name in LOST_SECONDS), reverse=True)
    lost, name = losses[0]
    yield report_run(
        "goodput",
        "problem" if share < _BAD_GOODPUT else "note",
        f"{format_percent(share)} of {format_duration(seconds)} was productive training; most of the rest was "
        f"{METRICS_BY_NAME[name].title}: {format_duration(lost)}",
        "the remaining time did not improve the model",
        _suggest_time_saving(record, name),
    )


def _suggest_time_saving(record: RunRecord, name: str) -> str:
    ways = {
        metrics.CHECKPOINT_SECONDS: rerun_command(record, *set_save_interval(record.plan, 4)),
        metrics.RESTART_SECONDS: f"save more often: {rerun_command(record, *set_save_interval(record.plan, 0.25))}",
        metrics.EVALUATION_SECONDS: rerun_command(record, *set_eval_interval(record.plan, 4)),
        metrics.COMPILE_SECONDS: rerun_command(record, "training.config.torch_compile=false"),
        metrics.DATA_SECONDS: "see the finding about data",
        metrics.SKIPPED_SECONDS: "see the finding about the loss",
    }
    return ways.get(name, "train longer; keep prepared data and base model on a fast disk")
