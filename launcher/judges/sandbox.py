"""Sandbox for the processes of judges: probe what this machine supports, and build the command of a sandboxed process.

Judged texts are hostile. A sandboxed process has no network, cannot signal or read other processes, cannot
write files, and is given an environment without secrets.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.core.worker import WorkerError, run_command

_SCRIPT = Path(__file__).with_name("sandbox_start.py")
_PROBE_SECONDS = 20.0
# What a process inside the sandbox could still do; printed by a process that tries it.
_PROBE = """
import os, socket, sys
from contextlib import suppress
listener, target = int(sys.argv[1]), sys.argv[2]
with suppress(OSError):
    socket.create_connection(("127.0.0.1", listener), timeout=5)
    print("network")
with suppress(OSError):
    os.kill(os.getppid(), 0)
    print("signals")
with suppress(OSError):
    open(target, "wb")
    print("files")
with suppress(OSError):
    open(f"/proc/{os.getppid()}/environ", "rb").read()
    print("processes")
print("done")
"""
_TITLES = {
    "network": "open network connections",
    "signals": "signal other processes of this user",
    "files": "create files",
    "processes": "read the environment of other processes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """Gaps of the sandbox on this machine, and whether sandboxed processes can start in namespaces of their own."""

    gaps: tuple[str, ...]  # what it can still do, in words
    namespaces: bool  # whether it can start in namespaces of its own


def make_sandboxed_command(command: Sequence[str], *, memory_mib: int = 0) -> list[str]:
    """Return the command that starts a program inside the sandbox; `memory_mib` is its RLIMIT_DATA (0: no limit)."""
    return _make_command(command, memory_mib, namespaces=probe_boundary().namespaces)


def describe_boundary() -> str:
    """Return a sentence about what hostile answers could do on this machine; empty if the sandbox has no gaps."""
    gaps = probe_boundary().gaps
    return f"this platform does not confine judges: a hostile answer could {' and '.join(gaps)}" if gaps else ""


@cache
def probe_boundary() -> Boundary:
    """Find the gaps of the sandbox: a process inside it tries to access the network, files and other processes."""
    for namespaces in (True, False):
        allowed = _probe(namespaces=namespaces)
        if allowed is not None:
            break
    gaps = tuple(title for name, title in _TITLES.items() if allowed is None or name in allowed)
    return Boundary(gaps=gaps, namespaces=namespaces)


def _probe(*, namespaces: bool) -> set[str] | None:
    """Return which forbidden actions succeed for a process in the sandbox; None if it does not start or finish."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as folder:
            port, target = str(listener.getsockname()[1]), str(Path(folder) / "written")
            command = _make_command([sys.executable, "-I", "-S", "-c", _PROBE, port, target], 0, namespaces=namespaces)
            result = run_command(command, timeout=_PROBE_SECONDS, environment={}, cwd="/")
    except (WorkerError, OSError):
        return None
    *allowed, last = result.stdout.split() or [""]
    return set(allowed) if result.returncode == 0 and last == "done" else None


def _make_command(command: Sequence[str], memory_mib: int, *, namespaces: bool) -> list[str]:
    start = [sys.executable, "-I", "-S", "-B", str(_SCRIPT), str(memory_mib)]
    return [*start, "namespaces" if namespaces else "here", *command]
