"""A run in Weights & Biases: opened so that it holds nobody up, and says nothing about the machine that it need not."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.metrics import METRICS, TOKENS_SEEN, TOTAL_SECONDS, load_metrics
from launcher.paths import RunPaths
from launcher.plan import Plan
from launcher.record import Outcome, WandbTrace
from launcher.tracking import (
    EPOCH_AXIS,
    MEDIANS,
    STEP_AXIS,
    Place,
    Tracking,
    find_trouble,
    format_machine,
    make_config,
    name_median,
)

_INIT_SECONDS = 20.0  # for a server that does not answer; wandb itself would wait 90 and then some
_FLUSH_SECONDS = 1  # what is not flushed is lost where this process is killed


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    run: Any
    run_id: str
    project: str
    mode: Literal["online", "offline"]
    url: str | None
    root: str  # the run's directory
    folder: str  # in it, of what is written here
    why: str

    def announce(self, before: WandbTrace | None) -> str:
        again = "goes on" if before is not None and before.id == self.run_id else "this run"
        if self.mode == "online":
            return f"W&B: {again}: {self.url}"
        return f"W&B: offline ({self.why}); upload it with: wandb sync {self.root}/wandb/offline-run-*"


class ServerUnusableError(Exception):
    """It does not answer, or it refuses: the run is to be kept offline, by another process. wandb would take this one's
    id for one that is in use."""


class NotSharedError(Exception):
    """The server does not let several nodes write one run: the first one tells of it alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How a run is to be opened."""

    run_id: str
    place: Place
    tracking: Tracking
    node: int = 0  # only the first tells metrics
    is_shared: bool = False  # other nodes write to it, too


def open_run(plan: Plan, paths: RunPaths, opening: Opening) -> Opened:
    if opening.tracking.mode == "offline":
        return _open(plan, paths, opening, "offline")
    if trouble := find_trouble(os.environ):
        raise ServerUnusableError(trouble)
    try:
        return _open(plan, paths, opening, "online")
    except Exception as error:  # refused keys, answers that do not come, proxies: wandb has no one class for them
        if opening.is_shared:
            raise NotSharedError from error
        why = f"{type(error).__name__}: {(str(error).strip() or 'no word').splitlines()[0][:200]}"
        raise ServerUnusableError(f"the server cannot be used: {why}") from error


def _open(plan: Plan, paths: RunPaths, opening: Opening, mode: Literal["online", "offline"]) -> Opened:
    import wandb

    is_shared = opening.is_shared and mode == "online"
    run = wandb.init(
        project=opening.place.project,
        entity=opening.place.entity,
        group=plan.wandb.group,
        name=plan.wandb.name or paths.run_id,
        tags=plan.wandb.tags,
        notes=plan.wandb.notes,
        job_type="train",
        id=opening.run_id,
        resume=None if is_shared else "allow",
        dir=str(paths.root),
        mode="shared" if is_shared else mode,
        config=None if opening.node else make_config(plan, _read_manifest(paths), data_key=None),
        settings=make_settings(plan, opening.node, is_shared=is_shared),
    )
    if not opening.node:
        _define_axes(run)
    return Opened(
        run=run,
        run_id=str(run.id),
        project=opening.place.project,
        mode=mode,
        url=str(run.url) if mode == "online" else None,
        root=str(paths.root),
        folder=f"wandb/{Path(str(run.settings.sync_dir)).name}",
        why=opening.tracking.reason,
    )


def make_settings(plan: Plan, node: int, *, is_shared: bool) -> Any:
    """No command line, no console, no code, no packages, no name of the machine: they may hold what is nobody's
    business. Every node of a shared run tells its own system metrics."""
    import wandb

    shared = {"x_primary": node == 0, "x_label": f"node-{node}", "x_update_finish_state": node == 0}
    return wandb.Settings(
        console="off",
        disable_git=True,
        save_code=False,
        silent=True,
        show_info=False,
        host=format_machine(plan.hardware),
        username="launcher",
        email="",
        program="launcher/train.py",
        x_stats_pid=os.getppid(),  # the training
        init_timeout=_INIT_SECONDS,
        x_disable_meta=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=_FLUSH_SECONDS,
        **(shared if is_shared else {}),
    )


def _define_axes(run: Any) -> None:
    """Everything over the steps; tokens and wall-clock time are there to be chosen."""
    run.define_metric(STEP_AXIS, hidden=True)
    run.define_metric(EPOCH_AXIS, step_metric=STEP_AXIS, hidden=True)
    for axis in (TOKENS_SEEN, TOTAL_SECONDS):
        run.define_metric(axis)
    for metric in METRICS:
        if metric.name not in (TOKENS_SEEN, TOTAL_SECONDS):
            run.define_metric(metric.name, step_metric=STEP_AXIS)
    run.define_metric("eval/*", step_metric=STEP_AXIS)


def summarise(run: Any, paths: RunPaths, outcome: Outcome) -> None:
    """How it ended, and what a table of runs is sorted by: a last step's speed says little."""
    told = {
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "steps_done": outcome.steps_done,
        "num_steps": outcome.num_steps,
        "best_step": outcome.best_step,
        "best_metric": outcome.best_metric,
        "attempts": len(outcome.attempts),
        "rungs": len(outcome.rungs),
        **outcome.goodput,
    }
    rows = load_metrics(paths.metrics) if paths.metrics.is_file() else []
    for name in MEDIANS:
        values = [row.values[name] for row in rows if name in row.values]
        if values:
            told[name_median(name)] = statistics.median(values)
    run.summary.update({name: value for name, value in told.items() if value not in (None, "")})


def log_artifacts(run: Any, plan: Plan, paths: RunPaths) -> None:
    import wandb

    for kind in plan.wandb.artifacts:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{plan.expert}-{kind}")
        artifact = wandb.Artifact(name, type="model" if kind == "adapter" else kind, metadata={"run": paths.run_id})
        if kind == "adapter":
            artifact.add_dir(str(paths.adapter), policy="immutable")  # not copied first
        else:
            for file in (paths.manifest, paths.plan):
                artifact.add_file(str(file), policy="immutable")
        run.log_artifact(artifact)


def _read_manifest(paths: RunPaths) -> object:
    return json.loads(paths.manifest.read_text(encoding="utf-8"))
