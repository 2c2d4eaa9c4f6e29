"""A run in Weights & Biases: opened so that it holds nobody up, and says nothing about the machine that it need not."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.metrics import METRICS, load_metrics
from launcher.paths import RunPaths
from launcher.plan import Plan
from launcher.record import Outcome, WandbTrace
from launcher.tracking import (
    EPOCH_AXIS,
    MEDIANS,
    STEP_AXIS,
    Mode,
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


def open_run(
    plan: Plan, paths: RunPaths, run_id: str, tracking: Tracking, *, node: int = 0, is_alone: bool = False
) -> Opened:
    """`is_alone`: other nodes are not to write to it, too."""
    if tracking.mode == "offline":
        return _open(plan, paths, run_id, "offline", tracking.reason, node)
    if trouble := find_trouble(os.environ):
        raise ServerUnusableError(trouble)
    is_shared = plan.hardware.nodes > 1 and not is_alone
    try:
        return _open(plan, paths, run_id, "online", tracking.reason, node, is_shared=is_shared)
    except Exception as error:  # refused keys, answers that do not come, proxies: wandb has no one class for them
        if is_shared:
            raise NotSharedError from error
        why = f"{type(error).__name__}: {(str(error).strip() or 'no word').splitlines()[0][:200]}"
        raise ServerUnusableError(f"the server cannot be used: {why}") from error


def _open(
    plan: Plan, paths: RunPaths, run_id: str, mode: Mode, why: str, node: int, *, is_shared: bool = False
) -> Opened:
    import wandb

    run = wandb.init(
        project=plan.wandb.project,
        entity=plan.wandb.entity,
        group=plan.wandb.group,
        name=plan.wandb.name or paths.run_id,
        tags=plan.wandb.tags,
        notes=plan.wandb.notes,
        job_type="train",
        id=run_id,
        resume=None if is_shared else "allow",
        dir=str(paths.root),
        mode="shared" if is_shared else mode,
        config=None if node else make_config(plan, _read_manifest(paths), data_key=None),
        settings=make_settings(plan, node, is_shared=is_shared),
    )
    if not node:
        _define_axes(run)
    is_online = mode == "online"
    return Opened(
        run=run,
        run_id=run_id,
        project=plan.wandb.project,
        mode="online" if is_online else "offline",
        url=str(run.url) if is_online else None,
        root=str(paths.root),
        folder=f"wandb/{Path(str(run.settings.sync_dir)).name}",
        why=why,
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
    for metric in METRICS:
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
        "error": outcome.error[:500],
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
            artifact.add_dir(str(paths.adapter))
        else:
            for file in (paths.manifest, paths.plan):
                artifact.add_file(str(file))
        run.log_artifact(artifact)


def _read_manifest(paths: RunPaths) -> object:
    return json.loads(paths.manifest.read_text(encoding="utf-8"))
