"""What became of a run: alive, dead without a word, stuck, failed, restarted; and what its time went into."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from launcher import metrics
from launcher.doctor.findings import Finding
from launcher.doctor.series import judged_steps, median_of
from launcher.doctor.words import again, evaluate_every, resume, save_every, tell
from launcher.locking import is_locked
from launcher.metrics import LOST_SECONDS, METRICS_BY_NAME, find_values
from launcher.paths import RunPaths
from launcher.record import Outcome, RunRecord, load_record
from launcher.units import format_duration, format_percent

# Without a step for so many usual ones, and for so long, something is stuck.
_STUCK_STEPS, _STUCK_SECONDS = 20, 120.0
_LONG_START_SECONDS = 1800.0
_FRESH_SECONDS = 30.0  # locks of some network disks are seen on their own node alone
_LONG_RUN_SECONDS = 600.0  # of a shorter one the start is a large part, and that is as it should be
_LOW_GOODPUT, _BAD_GOODPUT = 0.8, 0.5
_LONGEST_ERROR = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    record: RunRecord
    is_trained: bool | None  # some process holds its lock; None: its file system cannot tell
    idle_seconds: float | None  # since its last line of metrics; None: there is none
    age_seconds: float | None  # since it was started


def probe_run(paths: RunPaths) -> RunFacts:
    record = load_record(paths)
    try:
        idle: float | None = max(0.0, time.time() - paths.metrics.stat().st_mtime)
    except OSError:
        idle = None
    return RunFacts(
        record=record, is_trained=is_locked(paths), idle_seconds=idle, age_seconds=_find_age(record.outcome)
    )


def _find_age(outcome: Outcome | None) -> float | None:
    if outcome is None:
        return None
    began = outcome.attempts[-1].started_at if outcome.attempts else outcome.started_at
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(began)).total_seconds()
    except (ValueError, TypeError):
        return None


def judge_course(facts: RunFacts) -> Iterator[Finding]:
    record = facts.record
    yield _judge_status(facts)
    if record.outcome is not None:
        yield from _judge_attempts(record, record.outcome)
        yield from _judge_rungs(record, record.outcome)
        yield from _judge_goodput(record, _find_goodput(record))


def _judge_status(facts: RunFacts) -> Finding:
    record, outcome = facts.record, facts.record.outcome
    if outcome is None:
        start = resume(record)
        return tell("status", "note", "it was planned, but never started", "there is nothing to judge", start)
    done = f"{max(outcome.steps_done, _last_step(record)):,} of {outcome.num_steps or 0:,} steps"
    if outcome.status == "running":
        return _judge_running(facts, done)
    if outcome.status in ("failed", "crashed"):
        error = " ".join(outcome.error.split())[:_LONGEST_ERROR] or f"exit code {outcome.exit_code}"
        why = "it ended before its time; what was saved is kept"
        return tell("status", "problem", f"{outcome.status} after {done}: {error}", why, resume(record))
    if outcome.status == "stopped":
        return tell("status", "note", f"stopped after {done}", "it was asked to", resume(record))
    return tell("status", "ok", f"done, {done}{f' ({outcome.ended_because})' if outcome.ended_because else ''}")


def _last_step(record: RunRecord) -> int:
    return record.steps[-1].step if record.steps else 0


def _judge_running(facts: RunFacts, done: str) -> Finding:
    record = facts.record
    assert record.outcome is not None
    if facts.is_trained is False and (facts.idle_seconds or 0.0) < _FRESH_SECONDS and record.steps:
        found = f"{done}, the last a moment ago, but no process of this machine trains it"
        return tell(
            "status", "note", found, "it trains on another node, or was killed just now", "look again in a minute"
        )
    if facts.is_trained is False:
        return tell(
            "status",
            "problem",
            f"it says that it runs, after {done}, but no process trains it",
            "it was killed without a word: the machine, the kernel for want of memory (dmesg), or a scheduler",
            resume(record),
        )
    usual = median_of(judged_steps(record), metrics.STEP_SECONDS)
    if usual is None or facts.idle_seconds is None:
        age = facts.age_seconds or 0.0
        if age > _LONG_START_SECONDS:
            found = f"started {format_duration(age)} ago, and no step is done"
            return tell(
                "status", "problem", found, "it hangs before its first step", f"tail {record.paths.console_log}"
            )
        return tell("status", "ok", "it starts")
    evaluation = max(find_values(record.evaluations, metrics.EVAL_SECONDS), default=0.0)
    evaluation += max(find_values(record.rows, metrics.TASK_SECONDS), default=0.0)
    patience = max(_STUCK_SECONDS, _STUCK_STEPS * usual + 2 * evaluation)
    if facts.idle_seconds > patience:
        return tell(
            "status",
            "problem",
            f"no step for {format_duration(facts.idle_seconds)}, after {done}; a step takes {usual:.2g} s",
            f"it hangs; after {record.plan.guards.hang_seconds} s the run ends itself and tells which rank does what",
            f"tail {record.paths.console_log}; py-spy dump --pid {record.outcome.pid}",
        )
    left = (record.outcome.num_steps or 0) - _last_step(record)
    soon = f", about {format_duration(left * usual)} left" if left > 0 else ""
    return tell("status", "ok", f"running, {done}{soon}")


def _judge_attempts(record: RunRecord, outcome: Outcome) -> Iterator[Finding]:
    if len(outcome.attempts) < 2:
        return
    silent = sum(attempt.ended_at is None for attempt in outcome.attempts[:-1])
    died = f", {silent} of them ended without a word" if silent else ""
    yield tell(
        "restarts",
        "note",
        f"{len(outcome.attempts)} starts{died}",
        "steps behind the last checkpoint were trained again",
        f"{record.paths.logs} tells why each ended" if silent else "",
    )


def _judge_rungs(record: RunRecord, outcome: Outcome) -> Iterator[Finding]:
    if not outcome.rungs:
        return
    left = f"the next would be: {record.plan.ladder[0].action}" if record.plan.ladder else "none is left"
    yield tell(
        "out of memory",
        "note",
        f"{len(outcome.rungs)} rungs were taken: {', '.join(outcome.rungs)}; {left}",
        "the same is learnt, more slowly; later plans on this GPU stay below what ran out",
    )


def _find_goodput(record: RunRecord) -> Mapping[str, float]:
    if record.outcome is not None and record.outcome.goodput:
        return record.outcome.goodput
    told = [row.values for row in record.rows if metrics.GOODPUT in row.values]
    return told[-1] if told else {}


def _judge_goodput(record: RunRecord, goodput: Mapping[str, float]) -> Iterator[Finding]:
    share = goodput.get(metrics.GOODPUT)
    seconds = goodput.get(metrics.TOTAL_SECONDS) or sum(find_values(record.steps, metrics.STEP_SECONDS))
    if share is None or seconds < _LONG_RUN_SECONDS or share >= _LOW_GOODPUT:
        return
    losses = sorted(((goodput.get(name, 0.0), name) for name in LOST_SECONDS), reverse=True)
    lost, name = losses[0]
    yield tell(
        "goodput",
        "problem" if share < _BAD_GOODPUT else "note",
        f"{format_percent(share)} of {format_duration(seconds)} trained what counts; most was "
        f"{METRICS_BY_NAME[name].title}: {format_duration(lost)}",
        "the rest of the time was paid for, and taught nothing",
        _save_time(record, name),
    )


def _save_time(record: RunRecord, name: str) -> str:
    ways = {
        metrics.CHECKPOINT_SECONDS: again(record, *save_every(record.plan, 4)),
        metrics.RESTART_SECONDS: f"save more often: {again(record, *save_every(record.plan, 0.25))}",
        metrics.EVALUATION_SECONDS: again(record, *evaluate_every(record.plan, 4)),
        metrics.COMPILE_SECONDS: again(record, "training.config.torch_compile=false"),
        metrics.DATA_SECONDS: "the finding about data says how",
        metrics.SKIPPED_SECONDS: "the finding about the loss says how",
    }
    return ways.get(name, "longer runs; prepared data and a base on a fast disk")
