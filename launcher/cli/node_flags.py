"""Flags of one node of several, and of Slurm: which belong together, and the objects that they make."""

from __future__ import annotations

import argparse
from typing import Literal

from launcher.core.errors import InputError, Problem
from launcher.launch.nodes import Node
from launcher.render import Rendezvous, SlurmOptions


def make_node(arguments: argparse.Namespace) -> Node | None:
    """Return the node that this process starts; None for a single-node run, or if nothing starts here."""
    problems = tuple(_find_node_problems(arguments))
    if problems:
        raise InputError("incomplete multi-node flags", problems)
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
    rules = (
        (nodes == 1, "--node-rank", "it is for several nodes: give --nodes N too"),
        (nodes > 1 and rank >= nodes, "--node-rank", f"{rank} is not one of 0 to {nodes - 1}"),
        (arguments.rendezvous is None, "--rendezvous", "missing: HOST:PORT where node 0 listens"),
        (arguments.run_id is None, "--run-id", "missing: the same id on all nodes"),
        (arguments.slurm, "--slurm", "Slurm starts the nodes itself: omit --node-rank"),
    )
    return [Problem(where=where, what=what) for is_broken, where, what in rules if is_broken]


def make_slurm_options(arguments: argparse.Namespace) -> SlurmOptions | None:
    """Return the options of a Slurm job; None without --slurm."""
    values = {
        "--partition": arguments.partition,
        "--account": arguments.account,
        "--time-limit": arguments.time_limit,
        "--no-submit": arguments.no_submit or None,
    }
    if not arguments.slurm:
        check_unset(values, "--slurm")
        return None
    return SlurmOptions(
        partition=arguments.partition, account=arguments.account, time_limit_seconds=arguments.time_limit
    )


def check_unset(values: dict[str, object], required: str) -> None:
    """Refuse flags that have no effect without another one."""
    problems = _find_set(values, f"requires {required}")
    if problems:
        raise InputError(f"these flags require {required}", tuple(problems))


def _find_set(values: dict[str, object], what: str) -> list[Problem]:
    return [Problem(where=flag, what=what) for flag, value in values.items() if value is not None]
