"""Exit when the launcher or agent that started this process is gone."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.core.processes import LAUNCHER_PID, exit_after_parent


def exit_with_parent(*, outlives_agent: bool = False) -> None:
    """Start a thread that ends this process within seconds after its launcher or agent.

    Otherwise a killed agent would leave its worker training, and the other nodes waiting for it. With `outlives_agent`,
    only the launcher's end counts if there is one: it stops the training of a killed agent after the current step.
    """
    pid = os.environ.get(LAUNCHER_PID, "")
    launcher = int(pid) if pid.isdigit() else None
    parent = os.getppid()
    if parent == 1 and "TORCHELASTIC_RUN_ID" in os.environ and not _is_python(parent):
        os._exit(1)  # the agent was killed during our start-up: init has already adopted us
    exit_after_parent(None if outlives_agent and launcher is not None else parent, launcher)


def _is_python(pid: int) -> bool:
    """Whether a process runs this Python executable, as an agent does; in a container the agent may be process 1."""
    try:
        return Path(f"/proc/{pid}/exe").samefile("/proc/self/exe")
    except OSError:
        return False
