"""Verbs that need torch run in a process of their own, so that no module of the launcher imports it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from launcher.processes import make_dependent_environment

_SECONDS_TO_CLEAN_UP = 30.0


def run_module(module: str, arguments: Sequence[str]) -> int:
    """`python -m module …` on our own streams; its exit code is ours."""
    # -P: files in the working directory must not stand in for packages of the same name.
    command = [sys.executable, "-P", "-m", module, *arguments]
    sys.stdout.flush()
    process = subprocess.Popen(command, env=make_dependent_environment())
    try:
        code = process.wait()
    except KeyboardInterrupt:  # a terminal sends it to both: the other one cleans up after itself
        code = _wait_to_end(process)
    return code if code >= 0 else 128 - code


def _wait_to_end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_SECONDS_TO_CLEAN_UP)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        return process.wait()
