"""Processes that outlive their agent while their launcher is alive."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.core.processes import LAUNCHER_PID
from tests.conftest import python_path

# The agent starts a rank and dies; the rank writes a file half a second later.
AGENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"
RANK = """
import sys, time
from pathlib import Path
from launcher.core import processes
from launcher.training.runtime.parent_watch import exit_with_parent
processes._POLL_SECONDS = 0.02
exit_with_parent(outlives_agent=sys.argv[2] == "1")
Path(sys.argv[1] + ".started").touch()
time.sleep(0.5)
Path(sys.argv[1]).touch()
"""


@pytest.mark.parametrize("outlives", [True, False])
@pytest.mark.parametrize("has_launcher", [True, False])
def test_only_a_launcher_keeps_the_rank_of_a_killed_agent(tmp_path: Path, outlives: bool, has_launcher: bool) -> None:
    done = tmp_path / "done"
    environment = {**os.environ, "PYTHONPATH": python_path()}
    environment.pop(LAUNCHER_PID, None)
    if has_launcher:
        environment[LAUNCHER_PID] = str(os.getpid())
    # The rank must see the agent alive: wait for its file before the agent ends.
    agent = (
        f"{AGENT}\nimport time, pathlib\nwhile not pathlib.Path({str(done)!r} + '.started').exists(): time.sleep(0.01)"
    )
    subprocess.run((sys.executable, "-c", agent, RANK, str(done), str(int(outlives))), env=environment, check=True)
    deadline = time.monotonic() + (60 if outlives and has_launcher else 1.5)
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done.exists() == (outlives and has_launcher)
