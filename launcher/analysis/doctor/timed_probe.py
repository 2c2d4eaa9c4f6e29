"""Run programs and file system calls with a timeout, so that a hanging driver or disk cannot hang the doctor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from launcher.core.worker import WorkerError, run_command

_MAX_LINE = 160

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOutput:
    """Output of a program, or the reason why there is none."""

    text: str = ""
    error: str = ""


class ProbeTimeoutError(Exception):
    """A call did not return in time."""


def run_probe(command: Sequence[str], seconds: float) -> ProbeOutput:
    """Run a program; failures and timeouts become `error`."""
    try:
        result = run_command(command, timeout=seconds)
    except WorkerError as error:
        return ProbeOutput(error=f"{command[0]} {error}")
    if result.returncode:
        line = first_line(result.stdout) or first_line(result.stderr)
        return ProbeOutput(error=line or f"{command[0]} exited with code {result.returncode}")
    return ProbeOutput(text=result.stdout)


def first_line(text: str) -> str:
    """Return the first line that is not empty, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_MAX_LINE] if lines else ""


class _Result(Generic[Value]):
    value: Value
    error: Exception | None = None


def call_with_timeout(action: Callable[[], Value], seconds: float) -> Value:
    """Call `action` in a daemon thread, which is abandoned on timeout because a system call cannot be cancelled."""
    result: _Result[Value] = _Result()

    def act() -> None:
        try:
            result.value = action()
        except Exception as error:
            result.error = error

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise ProbeTimeoutError(f"timed out after {seconds:g} s")
    if result.error is not None:
        raise result.error
    return result.value
