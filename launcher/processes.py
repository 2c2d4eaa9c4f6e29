"""The processes of a run, found by the mark that they inherit in their environment (Linux: /proc).

Neither the process group nor the family tree will do: torch's agent and wandb put their children into sessions of their
own, and a child whose parent was killed belongs to init.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import launcher

LAUNCHER_PID = "LAUNCHER_PID"  # whoever has it ends itself where that process is gone
LAUNCHER_TERMINAL = "LAUNCHER_TERMINAL"  # "1": what is written to stderr is seen on a terminal, through a launcher
_PROC = Path("/proc")
_SITE_FOLDERS = ("site-packages", "dist-packages")


def make_child_environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process that runs code of ours: a checkout that is not installed is found too."""
    environment = dict(inherited)
    parent = Path(launcher.__file__).resolve().parent.parent
    if parent.name not in _SITE_FOLDERS:  # which must not come before the standard library
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(parent), environment.get("PYTHONPATH"))))
    return environment


def make_dependent_environment() -> dict[str, str]:
    """The same for one that must not outlive us: no orphan works on."""
    return {**make_child_environment(), LAUNCHER_PID: str(os.getpid())}


def find_processes(mark: str) -> tuple[int, ...]:
    """Those that live and have `NAME=value` in the environment they were started with. A zombie has none any more."""
    wanted = mark.encode()
    found = []
    for pid in _all_pids():
        with suppress(OSError):  # it ended, or it belongs to somebody else
            if wanted in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return tuple(pid for pid in found if pid != os.getpid())


def find_listeners(pids: Iterable[int], number: signal.Signals) -> tuple[int, ...]:
    """Those that have a handler for the signal: others would ignore it, or die of it."""
    return tuple(pid for pid in pids if _catches(pid, number))


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """A zombie is dead: whoever started it has not asked for its exit code yet, and may never do so."""
    state = _read_status(pid).get("State")
    return state is not None and not state.startswith(("Z", "X"))


def find_children(parent: int) -> tuple[tuple[int, str], ...]:
    """Processes that a process has started and that live, each with its state in a word."""
    found = []
    for pid in _all_pids():
        status = _read_status(pid)
        if status.get("PPid") == str(parent):
            found.append((pid, status.get("State", "?").partition("(")[2].rstrip(")") or "?"))
    return tuple(found)


def _read_status(pid: int) -> dict[str, str]:
    try:
        text = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _catches(pid: int, number: signal.Signals) -> bool:
    mask = _read_status(pid).get("SigCgt")
    return mask is not None and bool(int(mask, 16) >> (number - 1) & 1)
