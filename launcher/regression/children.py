"""`launcher VERB …` as a user would start it, one after another: two trainings at a time would slow each other down."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from launcher.errors import ExitCode, LauncherError, Problem
from launcher.inputs import Request
from launcher.paths import RunPaths
from launcher.processes import make_child_environment
from launcher.record import load_outcome

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class ChildFailedError(LauncherError):
    """Its exit code is ours."""

    def __init__(self, title: str, problems: tuple[Problem, ...], exit_code: int) -> None:
        super().__init__(title, problems)
        self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.RUN_FAILED


def train(request: Request, paths: RunPaths) -> float:
    """Seconds of CPU that it took, in all its processes. Raises where it does not end well, with its log."""
    words = ["train", request.expert, "--json", f"--run-id={paths.run_id}", f"--runs-dir={paths.root.parent}"]
    words += [f"--profile={request.profile}", *(f"--set={override}" for override in request.overrides)]
    words += [] if request.base is None else [f"--base={request.base}"]
    words += [] if request.max_steps is None else [f"--max-steps={request.max_steps}"]
    before = _cpu_seconds()
    code = _run(words)
    if code != ExitCode.DONE:
        raise ChildFailedError(f"the training {paths.run_id} failed (exit code {code})", _find_problems(paths), code)
    return _cpu_seconds() - before


def evaluate(paths: RunPaths, more: Sequence[str]) -> None:
    """Its result lies in the run's directory."""
    code = _run(["eval", f"--run={paths.root}", "--json", *more])
    if code != ExitCode.DONE:
        raise ChildFailedError(f"the evaluation of {paths.run_id} failed (exit code {code})", (), code)


def _find_problems(paths: RunPaths) -> tuple[Problem, ...]:
    """What it said is on the console above; here is what it wrote down."""
    outcome = load_outcome(paths.outcome)
    error = [Problem(where="error", what=outcome.error)] if outcome is not None and outcome.error else []
    log = [Problem(where="log", what=str(paths.console_log))] if paths.console_log.is_file() else []
    return (*error, *log)


def _cpu_seconds() -> float:
    """Of all that we have started and that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(words: Sequence[str]) -> int:
    """On our stderr: stdout is for the result. In a session of its own, so that a signal reaches it once, by us."""
    sys.stdout.flush()
    with _passing_on() as target:
        process = subprocess.Popen(
            # -P: files in the working directory must not stand in for packages of the same name.
            [sys.executable, "-P", "-m", "launcher", *words],
            env=make_child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        target.aim(process.pid)
        code = process.wait()
    if target.received:
        name = signal.Signals(target.received[0]).name
        raise ChildFailedError(f"stopped by {name}: nothing was compared", (), ExitCode.PREEMPTED)
    return code if code >= 0 else 128 - code


class _Target:
    """Who gets our signals: all of the child's group, as from a terminal. Those that came before it lived, too."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._group: int | None = None

    def aim(self, group: int) -> None:
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
def _passing_on() -> Iterator[_Target]:
    """What our starter ignores (nohup) stays ignored, here and in the child."""
    target = _Target()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    try:
        for number in caught:
            signal.signal(number, target.handle)
        yield target
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
