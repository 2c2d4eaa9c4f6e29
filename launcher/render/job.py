"""Options of a job that another system starts: Slurm, SkyPilot, Kubernetes or dstack."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from launcher.plan.model import Plan

Target = Literal["slurm", "skypilot", "kubernetes", "dstack"]
Workload = Literal["trainjob", "jobset", "job"]
TARGETS: tuple[Target, ...] = get_args(Target)
WORKLOADS: tuple[Workload, ...] = get_args(Workload)

TIME_MARGIN = 1.5  # estimates are off by tens of percent, and a job that hits its limit has to queue again
START_UP_SECONDS = 30 * 60  # downloads, compilation, evaluation, checkpoints: not in the estimate
TIME_STEP_SECONDS = 10 * 60


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Job options that are not in the plan. `partition` to `warning_seconds` are for Slurm, later ones for others."""

    target: Target = "slurm"
    time_limit_seconds: int | None = None  # None: from the plan's estimate
    partition: str | None = None
    account: str | None = None
    warning_seconds: int = 120  # before the limit; Slurm may send it up to a minute early
    image: str = ""
    volume: str = ""  # keeps runs, prepared data and downloads after a node is gone
    secrets: tuple[str, ...] = ()  # names of environment variables; their values are in the platform's own store
    spot: bool = True
    workload: Workload = "trainjob"
    expert: str = ""  # as the user named it
    expert_folder: str = ""  # copied to the nodes; empty: the image has it
    flags: tuple[str, ...] = ()  # further flags of `launcher train` on the nodes


def decide_time_limit(plan: Plan, options: JobOptions) -> int | None:
    """Return the time limit in seconds, requested or estimated; None if the platform's own limit applies."""
    if options.time_limit_seconds is not None or plan.speed.total_seconds is None:
        return options.time_limit_seconds
    seconds = plan.speed.total_seconds * TIME_MARGIN + START_UP_SECONDS
    return math.ceil(seconds / TIME_STEP_SECONDS) * TIME_STEP_SECONDS
