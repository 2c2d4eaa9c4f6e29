"""Processes of a run, identified by a variable that they inherit in their environment (Linux: /proc).

Process groups and parent ids are not enough: torch's agent and wandb start their children in new sessions, and a child
whose parent was killed is reparented to init.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import launcher

LAUNCHER_PID = "LAUNCHER_PID"  # a process with this variable exits when that process is gone
LAUNCHER_TERMINAL = "LAUNCHER_TERMINAL"  # "1": stderr is relayed to a terminal
_PROC = Path("/proc")
_POLL_SECONDS = 1.0
_CLEAN = frozenset({"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV"})
_SITE_FOLDERS = ("site-packages", "dist-packages")


def make_child_environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables with which a child process can import this package, even if it is not installed."""
    # Files in the working directory, which may be a downloaded one, are not imported.
    environment = {**inherited, "PYTHONSAFEPATH": "1"}
    parent = Path(launcher.__file__).resolve().parent.parent
    if parent.name not in _SITE_FOLDERS:  # which must not come before the standard library
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(parent), environment.get("PYTHONPATH"))))
    return environment


def make_clean_environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables for external programs: those that they need to start, and no secrets."""
    return {name: value for name, value in inherited.items() if name in _CLEAN}


def make_dependent_environment() -> dict[str, str]:
    """Return the environment variables for a child process that exits when this process has ended."""
    return {**make_child_environment(), LAUNCHER_PID: str(os.getpid())}


def find_processes(mark: str) -> tuple[int, ...]:
    """Return the ids of other live processes that were started with `mark` (NAME=value) in their environment."""
    entry = mark.encode()
    pids = []
    for pid in _all_pids():
        with suppress(OSError):  # it ended, or belongs to another user
            if entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                pids.append(pid)
    return tuple(pid for pid in pids if pid != os.getpid())


def find_listeners(pids: Iterable[int], number: signal.Signals) -> tuple[int, ...]:
    """Return the ids of those processes that have a handler for a signal."""
    masks = {pid: int(_read_status(pid).get("SigCgt", "0"), 16) for pid in pids}
    return tuple(pid for pid, mask in masks.items() if mask >> (number - 1) & 1)


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, ignoring those that are gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def exit_after_parent(parent: int | None, other: int | None = None) -> None:
    """Start a thread that ends this process within seconds after `parent` or `other` has ended; None is not watched."""

    def watch() -> None:
        while parent in (None, os.getppid()) and (other is None or is_alive(other)):
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def is_alive(pid: int) -> bool:
    """Whether a process is alive; a zombie is not."""
    state = _read_status(pid).get("State")
    return state is not None and not state.startswith(("Z", "X"))


def find_children(parent: int) -> tuple[tuple[int, str], ...]:
    """Return the live children of a process, each with its state."""
    children = []
    for pid in _all_pids():
        status = _read_status(pid)
        if status.get("PPid") == str(parent):
            children.append((pid, status.get("State", "?").partition("(")[2].rstrip(")") or "?"))
    return tuple(children)


def _read_status(pid: int) -> dict[str, str]:
    try:
        text = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def is_lost_rank(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone; torch has no single class for that."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    texts = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "unhandled system error")
    return type(error).__name__.startswith("Dist") or any(text in str(error) for text in texts)
