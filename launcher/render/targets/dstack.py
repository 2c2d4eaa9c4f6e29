"""Task file of dstack (0.22), for `dstack apply`."""

from __future__ import annotations

import math
import os
import shlex

from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.hardware.model import Gpu
from launcher.plan.model import Plan
from launcher.render.job import JobOptions, decide_time_limit
from launcher.render.targets.node import (
    ENVIRONMENT,
    RUN_FILES,
    SHM_GIB,
    STOP_SECONDS,
    VOLUME,
    Platform,
    compute_node_price,
    find_expert_mount,
    make_name,
    render_script,
    render_yaml,
)

PLATFORM = Platform(rank="$DSTACK_NODE_RANK", head="$DSTACK_MASTER_NODE_IP")
RETRY_HOURS = 24
_MEMORY_RANGE = (0.93, 1.08)  # drivers, catalogues and vendors round differently
_NAMES = {"a6000": "A6000", "rtx6000ada": "RTX6000Ada", "rtxpro6000server": "RTXPRO6000"}


def render_dstack(plan: Plan, paths: RunPaths, options: JobOptions) -> str:
    """Return the task file of a plan. Local paths in it are relative to the file."""
    seconds = decide_time_limit(plan, options)
    mounts = {RUN_FILES: "."} | {
        remote: os.path.relpath(local, paths.root) for remote, local in find_expert_mount(options).items()
    }
    hardware = plan.hardware
    task = {
        "type": "task",
        "name": make_name(paths.run_id),
        "nodes": hardware.nodes,
        "image": options.image,
        "user": "root",  # volumes belong to root
        "shell": "bash",
        "env": ENVIRONMENT | {name: f"${{{{ secrets.{name} }}}}" for name in options.secrets},
        "files": [f"{local}:{remote}" for remote, local in mounts.items()],
        "volumes": [f"{options.volume}:{VOLUME}"],
        "commands": [render_script(plan, paths, options, PLATFORM) + "\n"],
        "resources": {
            "cpu": None if hardware.is_host_assumed else f"{hardware.cpu_cores_per_node}..",
            # 0 GPUs must be stated: without it dstack adds one where it can.
            "gpu": 0 if hardware.gpu is None else _make_gpu(hardware.gpu, hardware.gpus_per_node),
            "shm_size": f"{SHM_GIB}GB",
        },
        "spot_policy": "spot" if options.spot else "on-demand",
        "max_price": compute_node_price(plan),
        "max_duration": None if seconds is None else f"{math.ceil(seconds / 60)}m",
        "stop_duration": f"{STOP_SECONDS}s",
        # Not on errors: dstack does not see exit codes, and would repeat a run with wrong input for hours.
        "retry": {"on_events": ["no-capacity", "interruption"], "duration": f"{RETRY_HOURS}h"},
    }
    return render_yaml(plan, [task], shlex.join(make_submit_command(paths)))


def make_submit_command(paths: RunPaths) -> list[str]:
    """Return the command that submits the task."""
    return ["dstack", "apply", "--yes", "--detach", "--file", str(paths.dstack)]


def _make_gpu(gpu: Gpu, count: int) -> dict[str, object]:
    low, high = (bytes_to_gib(gpu.memory_bytes) * factor for factor in _MEMORY_RANGE)
    name = _NAMES.get(gpu.key, gpu.key.split("-")[0].upper())
    return {"name": name, "memory": f"{math.floor(low)}GB..{math.ceil(high)}GB", "count": count}
