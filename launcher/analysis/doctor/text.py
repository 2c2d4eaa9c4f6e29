"""Findings about a run, and the commands that start it again with other settings."""

from __future__ import annotations

import shlex
from typing import Literal

from launcher.analysis.doctor.findings import Reporter
from launcher.plan.model import Plan
from launcher.runs.record import RunRecord

report_run = Reporter("run")
_LONGER = 4


def rerun_command(record: RunRecord, *settings: str) -> str:
    """Return the command that resumes the run with other settings, or trains again if it is done."""
    status = None if record.outcome is None else record.outcome.status
    if status == "done":
        return train_command(record, *settings)
    stop = "stop it, which saves a checkpoint; then " if status == "running" else ""
    return stop + " ".join((resume_command(record), *_format_overrides(settings)))


def train_command(record: RunRecord, *settings: str) -> str:
    """Return the command for a new run, for settings that affect learning."""
    return " ".join(("launcher train", shlex.quote(record.plan.expert), *_format_overrides(settings)))


def resume_command(record: RunRecord) -> str:
    """Return the command that resumes the run."""
    root = record.paths.root
    where = () if str(root.parent) == "runs" else ("--runs-dir", shlex.quote(str(root.parent)))
    return " ".join(("launcher train", shlex.quote(record.plan.expert), "--resume", shlex.quote(root.name), *where))


def _format_overrides(settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"--set {shlex.quote(setting)}" for setting in settings)


def suggest_longer_interval(record: RunRecord, name: Literal["save", "eval"]) -> str:
    """Return the command that saves or evaluates a fourth as often; a run that is too short for it needs no change."""
    schedule = record.plan.schedule
    interval = schedule.save_every_steps if name == "save" else schedule.evaluate_every_steps
    total = schedule.num_steps if record.outcome is None else record.outcome.num_steps
    if interval is not None and total is not None and _LONGER * interval > total:
        return f"nothing to change: a run of {total:,} steps is short, and a longer one can have longer intervals"
    set_interval = set_save_interval if name == "save" else set_eval_interval
    return rerun_command(record, *set_interval(record.plan, _LONGER))


def set_save_interval(plan: Plan, times: float) -> tuple[str, ...]:
    """Multiply the save interval. If the best checkpoint is kept, every save needs an evaluation."""
    return _set_interval(plan, ("save", "eval") if plan.schedule.load_best_model_at_end else ("save",), times)


def set_eval_interval(plan: Plan, times: float) -> tuple[str, ...]:
    """Multiply the evaluation interval, and that of saves if the best checkpoint is kept."""
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
