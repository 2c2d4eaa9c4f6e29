"""Runs `launcher train` and `launcher eval` as a user would, one at a time: two would slow each other down."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from launcher.bench.worker import ChildFailedError
from launcher.core.errors import ExitCode, Problem
from launcher.core.processes import make_child_environment
from launcher.core.run_paths import RunPaths
from launcher.core.worker import start_process
from launcher.request.request import Request
from launcher.runs.record import load_outcome

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def train(request: Request, paths: RunPaths) -> float:
    """Train and return the CPU seconds of all its processes; raises ChildFailedError."""
    words = ["train", request.expert, "--json", f"--run-id={paths.run_id}", f"--runs-dir={paths.root.parent}"]
    words += [f"--profile={request.profile}", *(f"--set={override}" for override in request.overrides)]
    words += [] if request.base is None else [f"--base={request.base}"]
    words += [] if request.max_steps is None else [f"--max-steps={request.max_steps}"]
    before = _children_cpu_seconds()
    code = _run(words)
    if code != ExitCode.DONE:
        raise ChildFailedError(f"training {paths.run_id} failed (exit code {code})", _list_problems(paths), code)
    return _children_cpu_seconds() - before


def evaluate(paths: RunPaths, flags: Sequence[str]) -> None:
    """Evaluate a run; the result is written to its directory. Raises ChildFailedError."""
    code = _run(["eval", f"--run={paths.root}", "--json", *flags])
    if code != ExitCode.DONE:
        raise ChildFailedError(f"evaluation of {paths.run_id} failed (exit code {code})", (), code)


def _list_problems(paths: RunPaths) -> tuple[Problem, ...]:
    """Return the recorded error and the log; the console output is already shown above."""
    outcome = load_outcome(paths.outcome)
    error = [Problem(where="error", what=outcome.error)] if outcome is not None and outcome.error else []
    log = [Problem(where="log", what=str(paths.console_log))] if paths.console_log.is_file() else []
    return (*error, *log)


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(words: Sequence[str]) -> int:
    """Run a command with its output on our stderr; it is in its own session and gets our signals exactly once."""
    sys.stdout.flush()
    with _forward_signals() as forwarder:
        # -P: files in the working directory must not shadow packages of the same name.
        command = [sys.executable, "-P", "-m", "launcher", *words]
        process = start_process(command, environment=make_child_environment())
        forwarder.set_group(process.pid)
        code = process.wait()
    if forwarder.received:
        name = signal.Signals(forwarder.received[0]).name
        raise ChildFailedError(f"stopped by {name}: nothing was compared", (), ExitCode.PREEMPTED)
    return code if code >= 0 else 128 - code


class _SignalForwarder:
    """Forwards signals to the child's process group, including those received before it started."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._group: int | None = None

    def set_group(self, group: int) -> None:
        self._group = group
        for number in self.received:
            self._send(number)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        if self._group is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._group, number)


@contextmanager
def _forward_signals() -> Iterator[_SignalForwarder]:
    """Signals that our parent ignores (nohup) stay ignored, here and in the child."""
    forwarder = _SignalForwarder()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    try:
        for number in caught:
            signal.signal(number, forwarder.handle)
        yield forwarder
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
