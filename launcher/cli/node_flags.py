"""Multi-node and job flags: checks that they are complete, and the Node or JobOptions that they describe."""

from __future__ import annotations

import argparse
import os
import re
from typing import Literal

from launcher.cli.environment import name_variable
from launcher.core.errors import InputError, Problem
from launcher.launch.nodes import Node
from launcher.render import JobOptions, Rendezvous
from launcher.render.job import TARGETS, Target


def make_node(arguments: argparse.Namespace) -> Node | None:
    """Return the node that --node-rank and --rendezvous describe; None without --node-rank."""
    problems = tuple(_find_node_problems(arguments))
    if problems:
        raise InputError("the flags of a training on several nodes are incomplete", problems)
    if arguments.node_rank is None:
        return None
    backend: Literal["static", "c10d"] = arguments.rdzv_backend or "static"
    timeout = {} if arguments.join_timeout is None else {"join_timeout_seconds": arguments.join_timeout}
    rendezvous = Rendezvous(
        host=arguments.rendezvous.host,
        port=arguments.rendezvous.port,
        backend=backend,
        max_restarts=arguments.max_restarts or 0,
        # torch would compare addresses, which is wrong behind a NAT and with two agents on one machine.
        is_host=arguments.node_rank == 0 if backend == "c10d" else None,
        **timeout,
    )
    return Node(rank=arguments.node_rank, rendezvous=rendezvous)


def _find_node_problems(arguments: argparse.Namespace) -> list[Problem]:
    rank, nodes = arguments.node_rank, arguments.nodes
    if rank is None:
        values = {
            "--rendezvous": arguments.rendezvous,
            "--rdzv-backend": arguments.rdzv_backend,
            "--join-timeout": arguments.join_timeout,
        }
        return _find_set(values, "requires --node-rank R, the rank of this node")
    resumes = bool(arguments.resume)  # a run by its name: it has the number of nodes
    rules = (
        (nodes == 1 and not resumes, "--node-rank", "requires --nodes N, the number of nodes"),
        (nodes > 1 and rank >= nodes, "--node-rank", f"{rank} is not one of 0 to {nodes - 1}"),
        (arguments.rendezvous is None, "--rendezvous", "missing: HOST:PORT where node 0 listens"),
        (arguments.run_id is None and not resumes, "--run-id", "missing: the same id on all nodes"),
        (arguments.on is not None, "--on", f"{arguments.on} starts the nodes itself: omit --node-rank"),
    )
    return [Problem(where=where, what=what) for is_broken, where, what in rules if is_broken]


# Flags of a job, the targets that use them, and how a message names those targets.
_CONTAINERS: tuple[Target, ...] = ("skypilot", "kubernetes", "dstack")
_JOB_FLAGS: dict[str, tuple[Target, ...]] = {
    "--partition": ("slurm",),
    "--account": ("slurm",),
    "--time-limit": TARGETS,
    "--image": _CONTAINERS,
    "--volume": _CONTAINERS,
    "--secrets": _CONTAINERS,
    "--on-demand": ("skypilot", "dstack"),
    "--workload": ("kubernetes",),
}
# What a volume may be, as a pattern and in words.
_VOLUMES: dict[Target, tuple[str, str]] = {
    "skypilot": ("[^/]+|[a-z0-9]+://.+", "a volume's name or a bucket's URL, such as s3://bucket"),
    "kubernetes": ("[^/]+", "the name of a persistent volume claim"),
    "dstack": ("[^/]+|/.+", "a volume's name or an absolute path on the nodes"),
}


def make_job_options(arguments: argparse.Namespace) -> JobOptions | None:
    """Return the options of the job for the target that --on names; None without --on."""
    target: Target | None = arguments.on
    values = {flag: getattr(arguments, flag.removeprefix("--").replace("-", "_")) or None for flag in _JOB_FLAGS}
    # A variable such as LAUNCHER_IMAGE is for those jobs that use it.
    typed = {flag: value for flag, value in values.items() if not os.environ.get(name_variable(flag))}
    if target is None:
        check_unset(typed, f"--on {{{','.join(TARGETS)}}}")
        return None
    problems = [
        Problem(where=flag, what=f"applies only to --on {' or '.join(_JOB_FLAGS[flag])}")
        for flag, value in typed.items()
        if value is not None and target not in _JOB_FLAGS[flag]
    ]
    if arguments.max_restarts and not os.environ.get(name_variable("--max-restarts")):
        what = f"has no effect: {target} has its own rules for repeating a job (docs/LAUNCH_TARGETS.md)"
        problems.append(Problem(where="--max-restarts", what=what))
    if target != "slurm":
        problems += _find_container_problems(arguments, target)
    if problems:
        raise InputError(f"these flags do not fit --on {target}", tuple(problems))
    return JobOptions(
        target=target,
        time_limit_seconds=arguments.time_limit,
        partition=arguments.partition,
        account=arguments.account,
        image=arguments.image or "",
        volume=arguments.volume or "",
        secrets=tuple(arguments.secrets or ()),
        spot=not arguments.on_demand,
        workload=arguments.workload or "trainjob",
        expert=arguments.expert,
    )


def _find_container_problems(arguments: argparse.Namespace, target: Target) -> list[Problem]:
    """List what a job in containers lacks: an image with the packages, and a volume that keeps checkpoints."""
    image = "missing: the image that the nodes run; build and push the Dockerfile of this project"
    pattern, kinds = _VOLUMES[target]
    problems = [] if arguments.image else [Problem(where="--image", what=image)]
    if arguments.volume is None:
        what = f"missing: {kinds}, which keeps the checkpoints of a preempted run"
        problems.append(Problem(where="--volume", what=what))
    elif not re.fullmatch(pattern, arguments.volume):
        problems.append(Problem(where="--volume", what=f"{arguments.volume!r} is not {kinds}"))
    return problems


def check_unset(values: dict[str, object], required: str) -> None:
    """Raise InputError if one of these flags is set, because it has no effect without the flag `required`."""
    problems = _find_set(values, f"requires {required}")
    if problems:
        raise InputError(f"these flags require {required}", tuple(problems))


def _find_set(values: dict[str, object], what: str) -> list[Problem]:
    return [Problem(where=flag, what=what) for flag, value in values.items() if value is not None]
