"""How findings about a run are put, and how a run is started again with another setting."""

from __future__ import annotations

import shlex

from launcher.doctor.findings import Finding, Status
from launcher.plan.model import Plan
from launcher.record import RunRecord


def tell(subject: str, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Finding(family="run", subject=subject, status=status, found=found, matters=matters, next_step=next_step)


def again(record: RunRecord, *settings: str) -> str:
    """How it runs may change on the way: a run that is not done goes on; one that is done is trained anew."""
    status = None if record.outcome is None else record.outcome.status
    if status == "done":
        return anew(record, *settings)
    stop = "stop it, which saves; then " if status == "running" else ""
    return stop + " ".join((resume(record), *_set(settings)))


def anew(record: RunRecord, *settings: str) -> str:
    """What is learnt may not change on the way: another run."""
    return " ".join(("launcher train", shlex.quote(record.plan.expert), *_set(settings)))


def resume(record: RunRecord) -> str:
    root = record.paths.root
    where = () if str(root.parent) == "runs" else ("--runs-dir", shlex.quote(str(root.parent)))
    return " ".join(("launcher train", shlex.quote(record.plan.expert), "--resume", shlex.quote(root.name), *where))


def _set(settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"--set {shlex.quote(setting)}" for setting in settings)


def save_every(plan: Plan, times: float) -> tuple[str, ...]:
    """So many times the present distance. Where the best is kept, it must be evaluated when it is saved."""
    return _change_cadence(plan, ("save", "eval") if plan.schedule.load_best_model_at_end else ("save",), times)


def evaluate_every(plan: Plan, times: float) -> tuple[str, ...]:
    return _change_cadence(plan, ("eval", "save") if plan.schedule.load_best_model_at_end else ("eval",), times)


def _change_cadence(plan: Plan, names: tuple[str, ...], times: float) -> tuple[str, ...]:
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
