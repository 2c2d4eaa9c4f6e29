"""Run torch's agents of several nodes on one machine: `python -m launcher.launch.multi_agent ARGV-AS-JSON …`.

The agents end together: if one fails, the others get some time to report it and are then killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

# A rank that loses another notices within 2 to 4 seconds, and its agent a little later.
GRACE_SECONDS = 20.0
_POLL_SECONDS = 0.1


def make_argv(commands: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return one command that runs all given commands together; a single command is returned as it is."""
    if len(commands) == 1:
        return tuple(commands[0])
    return (sys.executable, "-m", "launcher.launch.multi_agent", *(json.dumps(list(command)) for command in commands))


def run_together(commands: Sequence[Sequence[str]], grace_seconds: float = GRACE_SECONDS) -> int:
    """Run all commands and return the exit code of the first that failed, or 0."""
    agents = [subprocess.Popen(command) for command in commands]
    code, deadline = 0, float("inf")
    try:
        while None in [agent.poll() for agent in agents]:  # a list: poll every one
            if not code and (code := _first_failure(agents)):
                deadline = time.monotonic() + grace_seconds
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return code or _first_failure(agents)
    finally:
        for agent in agents:  # their ranks end themselves: they watch their agent
            agent.kill()
            agent.wait()


def _first_failure(agents: Sequence[subprocess.Popen[bytes]]) -> int:
    return next((abs(agent.returncode) for agent in agents if agent.returncode), 0)


if __name__ == "__main__":
    sys.exit(run_together([json.loads(text) for text in sys.argv[1:]]))
