"""One node of a multi-node training: its rendezvous, the checks of it, and the run directory that nodes may share.

Every wait has a timeout. Errors that torch's agent would report as a traceback, minutes later, are found before it
starts.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.core.errors import InputError, Problem, RunFailedError, show_value
from launcher.core.frozen_model import flatten
from launcher.core.run_paths import RunPaths, make_run_paths
from launcher.plan import Plan, load_plan
from launcher.render.command import Rendezvous, check_rendezvous
from launcher.render.spec import make_launch_spec
from launcher.runs.record import load_outcome

_POLL_SECONDS = 0.5
_ATTEMPT_SECONDS = 5.0  # per connection attempt: a firewall may drop packets silently
_WRITING_SECONDS = 60.0  # how long another node may take to write the run directory
# Explanations, and measurements of one node: nothing that runs depends on them.
_EXPLANATIONS = ("decisions", "memory", "notes", "speed")
_MEASURED = ("hardware.free_vram_mib", "hardware.ram_gib_per_node")
JOIN_FLAGS = "--node-rank R --rendezvous HOST:PORT --run-id ID"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Rank and rendezvous of one node."""

    rank: int
    rendezvous: Rendezvous

    @property
    def address(self) -> str:
        """HOST:PORT of node 0."""
        host = self.rendezvous.host
        return f"[{host}]:{self.rendezvous.port}" if ":" in host else f"{host}:{self.rendezvous.port}"

    @property
    def keeps_record(self) -> bool:
        """Whether rank 0, which writes outcome.json, is certain to run on this node; with c10d it may run on any."""
        return self.rank == 0 and self.rendezvous.backend == "static"


def check_node(plan: Plan, node: Node) -> None:
    """Check the rendezvous before data is prepared: its settings, its host and, on node 0, that the port is free."""
    check_rendezvous(make_launch_spec(plan), node.rendezvous, node.rank)
    _resolve(node)
    if node.rank == 0:
        check_port_free(node)


def check_port_free(node: Node) -> None:
    """Check that node 0 can listen on the rendezvous port, on every interface as torch's TCPStore will."""
    assert isinstance(node.rendezvous.port, int)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(
            ("", node.rendezvous.port), family=family, dualstack_ipv6=family == socket.AF_INET6, reuse_port=False
        ).close()
    except OSError as error:
        reason = "it is already in use" if error.errno == errno.EADDRINUSE else f"{error.strerror}"
        raise InputError(
            f"--rendezvous {node.address}: node 0 cannot listen on port {node.rendezvous.port}: {reason}",
            hint="another run on this machine may use this port: choose another one for all nodes",
        ) from None


def wait_for_head(node: Node) -> None:
    """Wait until node 0 accepts connections; raise RunFailedError after the join timeout."""
    assert isinstance(node.rendezvous.port, int)
    limit = node.rendezvous.join_timeout_seconds
    began = time.monotonic()
    reason = "no answer"
    while (left := began + limit - time.monotonic()) > 0:
        try:
            endpoint = (node.rendezvous.host, node.rendezvous.port)
            socket.create_connection(endpoint, timeout=min(_ATTEMPT_SECONDS, left)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error) or reason
        time.sleep(min(_POLL_SECONDS, max(0.0, left)))
    raise RunFailedError(
        f"node {node.rank} could not reach node 0 at {node.address} for {limit} s: {reason}",
        hint="start node 0 with the same --rendezvous, and check that the port is open between the nodes; "
        "--join-timeout waits longer",
    )


def _resolve(node: Node) -> None:
    try:
        socket.getaddrinfo(node.rendezvous.host, node.rendezvous.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise InputError(f"--rendezvous {node.address}: the host cannot be found: {reason}") from None


def find_run_to_join(runs_dir: Path, run_id: str, plan: Plan, node: Node) -> RunPaths | None:
    """Return this run's directory if another node has created it on a shared file system, else None.

    Raises InputError for another plan under the same name, or a run that has already started.
    """
    paths = RunPaths(make_run_paths(runs_dir, run_id).root, node_rank=node.rank)
    if not os.path.lexists(paths.root):
        return None
    _check_not_started(paths, node)
    _check_same_plan(paths, plan, _load_plan(paths))
    return paths


def _check_not_started(paths: RunPaths, node: Node) -> None:
    outcome = load_outcome(paths.outcome)
    if outcome is None or (node.rank > 0 and not outcome.is_final):
        return
    state = f"has ended already ({outcome.status})" if outcome.is_final else "has been started already"
    raise InputError(f"{paths.root}: this run {state}", hint="choose another --run-id, the same on all nodes")


def _load_plan(paths: RunPaths) -> Plan:
    """Load plan.json of a run directory that another node may be writing; it is the last file to be written."""
    deadline = time.monotonic() + _WRITING_SECONDS
    is_recent = time.time() - paths.root.lstat().st_mtime < _WRITING_SECONDS
    while is_recent and not paths.plan.is_file() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    try:
        return load_plan(paths.plan)
    except InputError:
        raise InputError(
            f"{paths.root} already exists, but its plan.json is missing or cannot be read",
            hint="choose another --run-id, the same on all nodes",
        ) from None


def _check_same_plan(paths: RunPaths, ours: Plan, theirs: Plan) -> None:
    problems = find_differences(theirs, ours)
    if problems:
        raise InputError(
            f"{paths.root} has a different plan than this node",
            problems,
            "start every node with the same flags and the same version, or choose another --run-id",
        )


def find_differences(theirs: Plan, ours: Plan) -> tuple[Problem, ...]:
    """List the settings in which two plans differ, without explanations and measurements."""
    there, here = (flatten(plan.model_dump(mode="json", exclude=set(_EXPLANATIONS))) for plan in (theirs, ours))
    return tuple(
        Problem(where=key, what=f"{show_value(there.get(key))} in its plan, {show_value(here.get(key))} on this node")
        for key in sorted(there.keys() | here.keys())
        if key not in _MEASURED and there.get(key) != here.get(key)
    )
