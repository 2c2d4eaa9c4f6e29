"""Rendezvous of the processes of a run, the part of a launch that no plan can know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.core.errors import InputError, Problem
from launcher.render.spec import LaunchSpec


class Verbatim(str):
    """A word of a command that is already shell text, such as "$port" with its quotes; written unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Address of node 0 and the join timeout. On a single node only `port` and `max_restarts` are used."""

    host: str
    port: int | Verbatim
    backend: Literal["static", "c10d"] = "static"
    max_restarts: int = 0
    join_timeout_seconds: int = 300  # torch waits 900 (static) or 600 (c10d)
    is_host: bool | None = None  # c10d on one machine: whether this agent is the host

    def format_conf(self) -> str:
        """Return the timeout option, whose name differs by backend; torch ignores the wrong one."""
        word = "timeout" if self.backend == "static" else "join_timeout"
        conf = f"{word}={self.join_timeout_seconds}"
        return conf if self.is_host is None else f"{conf},is_host={int(self.is_host)}"


# A single node: accelerate chooses a free port if it is 0.
ANY_FREE_PORT = Rendezvous(host="localhost", port=0)


def check_rendezvous(spec: LaunchSpec, rendezvous: Rendezvous, machine_rank: int | Verbatim | None) -> None:
    """Raise InputError if the rendezvous does not fit the nodes."""
    many_nodes = spec.num_nodes > 1
    rules = (
        (many_nodes and rendezvous.port == 0, "rendezvous", "many nodes need one port that all of them know"),
        (
            many_nodes and rendezvous.backend == "static" and rendezvous.max_restarts > 0,
            "max_restarts",
            "nodes do not restart together under a static rendezvous; use c10d",
        ),
        (not many_nodes and rendezvous.backend == "c10d", "rendezvous", "c10d is for many nodes"),
        (
            isinstance(machine_rank, int) and not 0 <= machine_rank < spec.num_nodes,
            "node rank",
            f"{machine_rank} is not one of 0 to {spec.num_nodes - 1}",
        ),
    )
    problems = tuple(Problem(where=where, what=what) for broken, where, what in rules if broken)
    if problems:
        raise InputError("invalid rendezvous", problems)
