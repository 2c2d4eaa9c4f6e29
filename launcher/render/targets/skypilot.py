"""Task file of SkyPilot (0.14), for `sky jobs launch`: a managed job that recovers from preemption."""

from __future__ import annotations

import shlex

from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render.job import JobOptions, decide_time_limit
from launcher.render.targets.node import (
    ENVIRONMENT,
    RUN_FILES,
    SHM_GIB,
    STOP_SECONDS,
    UNSET,
    VOLUME,
    Platform,
    compute_node_price,
    find_expert_mount,
    make_name,
    render_script,
    render_yaml,
)

PLATFORM = Platform(rank="$SKYPILOT_NODE_RANK", head=r"${SKYPILOT_NODE_IPS%%$'\n'*}")
MAX_RESTARTS = 2  # after a failure; exit code 75 and preemptions are not counted

# Names in SkyPilot's catalogue that are not ours in capital letters.
_NAMES = {
    "a100": "A100-80GB",
    "a100-40gb": "A100",
    "a100-pcie": "A100-80GB",
    "a100-pcie-40gb": "A100",
    "a6000": "RTXA6000",
    "h100-pcie": "H100",
    "rtx6000ada": "RTX6000-Ada",
    "rtxpro6000server": "RTXPRO6000",
}


def render_skypilot(plan: Plan, paths: RunPaths, options: JobOptions) -> str:
    """Return the task file of a plan."""
    seconds = decide_time_limit(plan, options)
    # SkyPilot has no time limit. --foreground sends the signal once: the second one would end the training at once.
    stop = ("timeout", "--foreground", f"--kill-after={STOP_SECONDS}", str(seconds)) if seconds else ()
    is_bucket = "://" in options.volume
    task = {
        "name": make_name(paths.run_id),
        "num_nodes": plan.hardware.nodes,
        "resources": _make_resources(plan, options),
        "envs": ENVIRONMENT,
        "secrets": dict.fromkeys(options.secrets, UNSET) or None,
        "volumes": None if is_bucket else {VOLUME: options.volume},
        "file_mounts": {
            RUN_FILES: str(paths.root),
            **find_expert_mount(options),
            **({VOLUME: {"source": options.volume, "mode": "MOUNT_CACHED"}} if is_bucket else {}),
        },
        # SkyPilot installs itself in the container as root.
        "config": {
            "docker": {"run_options": ["--user=root", f"--shm-size={SHM_GIB}g"]},
            "kubernetes": {"pod_config": {"spec": {"securityContext": {"runAsUser": 0}}}},
        },
        "run": render_script(plan, paths, options, PLATFORM, stop) + "\n",
    }
    return render_yaml(plan, [task], shlex.join(make_submit_command(paths, options)))


def make_submit_command(paths: RunPaths, options: JobOptions) -> list[str]:
    """Return the command that submits the task; the values of secrets come from the environment."""
    secrets = [word for name in options.secrets for word in ("--secret", name)]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, str(paths.skypilot)]


def _make_resources(plan: Plan, options: JobOptions) -> dict[str, object]:
    hardware = plan.hardware
    return {
        "accelerators": None if hardware.gpu is None else f"{_name_gpu(hardware.gpu.key)}:{hardware.gpus_per_node}",
        "cpus": None if hardware.is_host_assumed else f"{hardware.cpu_cores_per_node}+",
        "image_id": f"docker:{options.image}",
        "use_spot": options.spot,
        "max_hourly_cost": compute_node_price(plan),
        "job_recovery": {
            "recover_on_exit_codes": [int(ExitCode.PREEMPTED)],
            "max_restarts_on_errors": MAX_RESTARTS,
        },
    }


def _name_gpu(key: str) -> str:
    return _NAMES.get(key, key.upper())
