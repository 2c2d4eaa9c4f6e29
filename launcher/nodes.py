"""One of many nodes: where they meet, whether that place can be used, and the run directory that they may share.

Everything here has a bound. What torch's agent would tell by a traceback, minutes later, is told before it is started.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import InputError, Problem, RunFailedError, show_value
from launcher.paths import RunPaths, name_run
from launcher.plan import Plan, load_plan
from launcher.record import load_outcome
from launcher.render.rendezvous import Rendezvous, check_rendezvous
from launcher.render.spec import make_launch_spec
from launcher.values import flatten

_LOOK_EVERY_SECONDS = 0.5
_ATTEMPT_SECONDS = 5.0  # to connect once: a firewall that drops packets answers never
_WRITING_SECONDS = 60.0  # how long another node may take to write the run directory
_MAX_SHOWN = 12
# They tell about a plan, or were measured on one node: nothing that runs depends on them.
_TOLD = ("decisions", "memory", "notes", "speed")
_MEASURED = ("hardware.free_vram_mib", "hardware.ram_gib_per_node")
JOIN_FLAGS = "--node-rank R --rendezvous HOST:PORT --run-id ID"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    rank: int
    rendezvous: Rendezvous

    @property
    def address(self) -> str:
        host = self.rendezvous.host
        return f"[{host}]:{self.rendezvous.port}" if ":" in host else f"{host}:{self.rendezvous.port}"

    @property
    def keeps_record(self) -> bool:
        """Whether rank 0, which writes outcome.json, runs here for certain: under c10d it may run on any node."""
        return self.rank == 0 and self.rendezvous.backend == "static"


def check_node(plan: Plan, node: Node) -> None:
    """All that can be known before anything is prepared. A busy port would be told only once torch is loaded."""
    check_rendezvous(make_launch_spec(plan), node.rendezvous, node.rank)
    _resolve(node)
    if node.rank == 0:
        check_port_free(node)


def check_port_free(node: Node) -> None:
    """Binds it as torch's store will, on every interface, and lets go."""
    assert isinstance(node.rendezvous.port, int)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(
            ("", node.rendezvous.port), family=family, dualstack_ipv6=family == socket.AF_INET6, reuse_port=False
        ).close()
    except OSError as error:
        said = "it is in use already" if error.errno == errno.EADDRINUSE else f"{error.strerror}"
        raise InputError(
            f"--rendezvous {node.address}: node 0 cannot listen on port {node.rendezvous.port}: {said}",
            hint="give all nodes another port; another run on this machine may have it",
        ) from None


def wait_for_head(node: Node) -> None:
    """Until node 0 listens. A node that comes early waits; one that was told a wrong address says so."""
    assert isinstance(node.rendezvous.port, int)
    limit = node.rendezvous.join_timeout_seconds
    began = time.monotonic()
    said = "nobody answered"
    while (left := began + limit - time.monotonic()) > 0:
        try:
            place = (node.rendezvous.host, node.rendezvous.port)
            socket.create_connection(place, timeout=min(_ATTEMPT_SECONDS, left)).close()
            return
        except OSError as error:
            said = error.strerror or str(error) or said
        time.sleep(min(_LOOK_EVERY_SECONDS, max(0.0, left)))
    raise RunFailedError(
        f"node {node.rank} could not reach node 0 at {node.address} for {limit} s: {said}",
        hint="is node 0 started, with the same --rendezvous, and is the port open between the nodes? "
        "--join-timeout waits longer",
    )


def _resolve(node: Node) -> None:
    try:
        socket.getaddrinfo(node.rendezvous.host, node.rendezvous.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "not a host name"
        raise InputError(f"--rendezvous {node.address}: the host cannot be found: {said}") from None


def find_run_to_join(runs_dir: Path, run_id: str, plan: Plan, node: Node) -> RunPaths | None:
    """The directory of this run, where another node that shares our file system has made it; None: make it.

    Another plan under the same name, or a run that has been, is refused.
    """
    paths = RunPaths(name_run(runs_dir, run_id).root, node_rank=node.rank)
    if not os.path.lexists(paths.root):
        return None
    _check_not_begun(paths, node)
    _check_same_plan(paths, plan, _load_plan(paths))
    return paths


def _check_not_begun(paths: RunPaths, node: Node) -> None:
    outcome = load_outcome(paths.outcome)
    if outcome is None or (node.rank > 0 and not outcome.is_final):
        return
    state = f"has ended already ({outcome.status})" if outcome.is_final else "has been started already"
    raise InputError(f"{paths.root}: this run {state}", hint="choose another --run-id, the same on all nodes")


def _load_plan(paths: RunPaths) -> Plan:
    """plan.json is written last: where it lies, the directory is whole."""
    deadline = time.monotonic() + _WRITING_SECONDS
    is_young = time.time() - paths.root.lstat().st_mtime < _WRITING_SECONDS
    while is_young and not paths.plan.is_file() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_SECONDS)
    try:
        return load_plan(paths.plan)
    except InputError:
        raise InputError(
            f"{paths.root} exists already, and has no plan that can be joined",
            hint="choose another --run-id, the same on all nodes",
        ) from None


def _check_same_plan(paths: RunPaths, ours: Plan, theirs: Plan) -> None:
    problems = find_differences(theirs, ours)
    if problems:
        more = len(problems) - _MAX_SHOWN
        shown = problems[:_MAX_SHOWN] + ((Problem(where="", what=f"and {more} more"),) if more > 0 else ())
        raise InputError(
            f"{paths.root} holds another plan than this node's",
            shown,
            "start every node with the same flags and the same version, or choose another --run-id",
        )


def find_differences(theirs: Plan, ours: Plan) -> tuple[Problem, ...]:
    """Key by key, in what runs."""
    there, here = (flatten(plan.model_dump(mode="json", exclude=set(_TOLD))) for plan in (theirs, ours))
    return tuple(
        Problem(where=key, what=f"{show_value(there.get(key))} there, {show_value(here.get(key))} on this node")
        for key in sorted(there.keys() | here.keys())
        if key not in _MEASURED and there.get(key) != here.get(key)
    )
