"""Verbs that need torch run in a separate process, so that the command line never imports it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from launcher.core.installation import TRAIN_PACKAGES, find_missing, make_missing_error
from launcher.core.processes import make_dependent_environment

_CLEANUP_SECONDS = 30.0


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module …` with stdin, stdout, stderr and signals of this process, and return its exit code."""
    if missing := find_missing(TRAIN_PACKAGES):
        raise make_missing_error(f"launcher {module.rpartition('.')[2]}", missing)
    # -P: files in the working directory must not shadow packages of the same name.
    command = [sys.executable, "-P", "-m", module, *arguments]
    sys.stdout.flush()
    process = subprocess.Popen(command, env=make_dependent_environment())

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    caught = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, forward) for number in caught}
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal signals both processes; the child cleans up
        code = _wait_or_kill(process)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _wait_or_kill(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_CLEANUP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        return process.wait()
