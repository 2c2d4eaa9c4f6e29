"""The flags of one node among many, and of Slurm: which belong together, and what they mean."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

from launcher.errors import InputError, Problem

if TYPE_CHECKING:
    from launcher.nodes import Node
    from launcher.render import SlurmOptions


def make_node(arguments: argparse.Namespace) -> Node | None:
    """None: one node, or none that is to be started here."""
    problems = tuple(_find_node_problems(arguments))
    if problems:
        raise InputError("these flags do not make a node", problems)
    if arguments.node_rank is None:
        return None
    from launcher.nodes import Node
    from launcher.render import Rendezvous

    backend: Literal["static", "c10d"] = arguments.rdzv_backend or "static"
    waiting = {} if arguments.join_timeout is None else {"join_timeout_seconds": arguments.join_timeout}
    rendezvous = Rendezvous(
        host=arguments.rendezvous.host,
        port=arguments.rendezvous.port,
        backend=backend,
        max_restarts=arguments.max_restarts or 0,
        # torch would guess by comparing addresses, and guess wrong behind a NAT and with two agents on one machine.
        is_host=arguments.node_rank == 0 if backend == "c10d" else None,
        **waiting,
    )
    return Node(rank=arguments.node_rank, rendezvous=rendezvous)


def _find_node_problems(arguments: argparse.Namespace) -> list[Problem]:
    rank, nodes = arguments.node_rank, arguments.nodes
    given = [
        flag
        for flag, value in (
            ("--rendezvous", arguments.rendezvous),
            ("--rdzv-backend", arguments.rdzv_backend),
            ("--join-timeout", arguments.join_timeout),
        )
        if value is not None
    ]
    if rank is None:
        return [Problem(where=flag, what="it needs --node-rank R: which of the nodes this is") for flag in given]
    rules = (
        (nodes == 1, "--node-rank", "it is for many nodes: give --nodes N too"),
        (nodes > 1 and rank >= nodes, "--node-rank", f"{rank} is not one of 0 to {nodes - 1}"),
        (arguments.rendezvous is None, "--rendezvous", "HOST:PORT must be given: where node 0 listens"),
        (arguments.run_id is None, "--run-id", "it must be given, the same on all nodes: they are one run"),
        (arguments.slurm, "--slurm", "Slurm starts the nodes itself: it excludes --node-rank"),
    )
    return [Problem(where=where, what=what) for is_broken, where, what in rules if is_broken]


def make_slurm_options(arguments: argparse.Namespace) -> SlurmOptions | None:
    """None: not to be run by Slurm."""
    if not arguments.slurm:
        given = {
            "--partition": arguments.partition,
            "--account": arguments.account,
            "--time-limit": arguments.time_limit,
            "--no-submit": arguments.no_submit or None,
        }
        problems = tuple(
            Problem(where=flag, what="it is for --slurm") for flag, value in given.items() if value is not None
        )
        if problems:
            raise InputError("these flags say nothing without --slurm", problems)
        return None
    from launcher.render import SlurmOptions

    return SlurmOptions(
        partition=arguments.partition, account=arguments.account, time_limit_seconds=arguments.time_limit
    )
