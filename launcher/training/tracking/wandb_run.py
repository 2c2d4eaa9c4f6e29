"""Open a run in Weights & Biases with time limits and without private facts about the machine."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Literal

from launcher.core.errors import first_line
from launcher.core.metrics import METRICS, TOKENS_SEEN, TOTAL_SECONDS
from launcher.core.run_paths import RunPaths
from launcher.plan import Plan
from launcher.runs.wandb_settings import (
    EPOCH_AXIS,
    STEP_AXIS,
    WandbProject,
    check_server,
    format_machine,
    make_config,
    without_local_settings,
)

_INIT_SECONDS = 20.0  # for a server that does not respond; wandb's default is 90
_FLUSH_SECONDS = 1  # unflushed records are lost if this process is killed


class ServerUnusableError(Exception):
    """The W&B server does not respond or refuses the run, which must be logged offline by a new process.

    In the process that tried it, wandb considers the run id in use.
    """


class NotSharedError(Exception):
    """The W&B server does not let several nodes log to one run; only node 0 logs."""


def open_run(
    plan: Plan,
    paths: RunPaths,
    place: WandbProject,
    *,
    run_id: str,
    mode: Literal["online", "offline"],
    node: int,
    is_shared: bool,
) -> Any:
    """Open the W&B run; raises ServerUnusableError or NotSharedError.

    Only node 0 logs metrics. `is_shared`: other nodes log to this run, too.
    """
    is_shared = is_shared and mode == "online"
    if mode == "online" and (trouble := check_server(os.environ)):
        raise ServerUnusableError(trouble)
    try:
        import wandb
        from wandb.sdk.wandb_setup import singleton

        with without_local_settings():
            _ = singleton().settings  # loaded by the first access
        run = wandb.init(
            project=place.project,
            entity=place.entity,
            group=plan.wandb.group,
            name=plan.wandb.name or paths.run_id,
            tags=plan.wandb.tags,
            notes=plan.wandb.notes,
            job_type="train",
            id=run_id,
            resume=None if is_shared else "allow",
            dir=str(paths.root),
            mode="shared" if is_shared else mode,
            config=None if node else make_config(plan, read_manifest(paths)),
            settings=_make_settings(plan, node, is_shared=is_shared),
        )
        if not node:
            _define_axes(run)
    except Exception as error:  # wandb has no common class for refused keys, timeouts, proxies
        if mode == "offline":
            raise
        if is_shared:
            raise NotSharedError from error
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise ServerUnusableError(f"the server cannot be used: {cause}") from error
    return run


def _make_settings(plan: Plan, node: int, *, is_shared: bool) -> Any:
    """Return settings that send no command line, console, code, packages or host name, which may be private.

    Every node of a shared run logs its own system metrics.
    """
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
    """Use the step as the x-axis of every metric; tokens and wall-clock time remain selectable."""
    run.define_metric(STEP_AXIS, hidden=True)
    run.define_metric(EPOCH_AXIS, step_metric=STEP_AXIS, hidden=True)
    for axis in (TOKENS_SEEN, TOTAL_SECONDS):
        run.define_metric(axis)
    for metric in METRICS:
        if metric.name not in (TOKENS_SEEN, TOTAL_SECONDS):
            run.define_metric(metric.name, step_metric=STEP_AXIS)
    run.define_metric("eval/*", step_metric=STEP_AXIS)


def log_artifacts(run: Any, plan: Plan, paths: RunPaths) -> None:
    """Upload the artifacts that the plan requests: the adapter, the manifest."""
    import wandb

    for kind in plan.wandb.artifacts:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{plan.expert}-{kind}")
        artifact = wandb.Artifact(name, type="model" if kind == "adapter" else kind, metadata={"run": paths.run_id})
        if kind == "adapter":
            artifact.add_dir(str(paths.adapter), policy="immutable")  # uploaded without a local copy
        else:
            for file in (paths.manifest, paths.plan):
                artifact.add_file(str(file), policy="immutable")
        run.log_artifact(artifact)


def read_manifest(paths: RunPaths) -> object:
    """Return the manifest of a run."""
    return json.loads(paths.manifest.read_text(encoding="utf-8"))
