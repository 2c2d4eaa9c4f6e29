"""How the processes of a run find each other: the part of a launch that no plan can know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.errors import InputError, Problem
from launcher.render.spec import LaunchSpec


class Verbatim(str):
    """A word of a command that is shell text already, such as "$port" with its quotes: written as it stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where node 0 listens, and how long it waits for the others. On one node only `port` and `max_restarts` count."""

    host: str
    port: int | Verbatim
    backend: Literal["static", "c10d"] = "static"
    max_restarts: int = 0
    join_timeout_seconds: int = 300  # torch waits 900 (static) or 600 (c10d)
    is_host: bool | None = None  # c10d on one machine: the second agent must be told that it is not the host

    def format_conf(self) -> str:
        """torch's word for the wait differs by backend, and the wrong one is ignored."""
        word = "timeout" if self.backend == "static" else "join_timeout"
        conf = f"{word}={self.join_timeout_seconds}"
        return conf if self.is_host is None else f"{conf},is_host={int(self.is_host)}"


# One node: accelerate looks for a free port itself when it is given 0.
ANY_FREE_PORT = Rendezvous(host="localhost", port=0)


def check_rendezvous(spec: LaunchSpec, rendezvous: Rendezvous, machine_rank: int | Verbatim | None) -> None:
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
        raise InputError("the nodes could not find each other", problems)
