"""Workers of the judges: confined child processes, killed on a timeout and restarted on the next request."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.core.errors import RunFailedError
from launcher.core.worker import Worker, WorkerError, run_command
from launcher.judges.sandbox import make_sandboxed_command

_SECONDS_TO_START = 60.0
_SECONDS_TO_REPEAT = 10.0
_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_VARIABLES = {"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH"}


class LimitedWorker:
    """A sandboxed child process that prints one line when it is ready, and then one line for each line it receives."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        seconds: float,
        memory_mib: int,
        is_reused: bool = True,
    ) -> None:
        """Prepare a worker; `is_reused` false gives every request a process of its own."""
        self._command = list(command)
        self._environment = dict(environment)
        self._memory_mib = memory_mib
        self.seconds = seconds
        self._is_reused = is_reused
        self._worker: Worker | None = None
        self._next: Worker | None = None  # started while the current request or the caller is busy

    def request(self, line: str, *, retry: bool = True) -> str:
        """Return the reply to a line; raises WorkerError after a timeout, a crash or too much output.

        A failure may be the fault of an earlier request, so a request that fails in a used process is retried in a
        new one; `retry=False` is for batches whose parts are sent again one by one.
        """
        is_new = self._worker is None or not self._is_reused
        try:
            return self._request_once(line)
        except WorkerError:
            if is_new or not retry:
                raise
        return self._request_once(line)

    def close(self) -> None:
        """Kill the processes, if there are any."""
        for worker in (self._worker, self._next):
            if worker is not None:
                worker.close()
        self._worker = self._next = None

    def _request_once(self, line: str) -> str:
        worker = self._worker = self._worker or self._get_ready()
        if not self._is_reused:
            self._next = self._start()
        try:
            return worker.request(line, self.seconds)
        except WorkerError:
            self._end_current()
            raise
        finally:
            if not self._is_reused:
                self._end_current()

    def _end_current(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _start(self) -> Worker:
        command = make_sandboxed_command(self._command, memory_mib=self._memory_mib)
        return Worker(command, environment=self._environment, cwd="/")

    def _get_ready(self) -> Worker:
        """Return a process that has printed its first line."""
        worker, self._next = self._next or self._start(), None
        try:
            worker.read_line(_SECONDS_TO_START)
        except WorkerError as error:
            worker.close()
            program, hint = Path(self._command[0]).name, f"the command was: {' '.join(self._command)}"
            reason = f"{error}{self._read_last_error()}"
            raise RunFailedError(f"cannot start {program} to judge answers: it {reason}", hint=hint) from None
        return worker

    def _read_last_error(self) -> str:
        """Run the command again and return the last line of its stderr as `: line`; empty if there is none."""
        command = make_sandboxed_command(self._command, memory_mib=self._memory_mib)
        try:
            result = run_command(command, timeout=_SECONDS_TO_REPEAT, environment=self._environment, cwd="/")
        except WorkerError:
            return ""
        lines = result.stderr.split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def make_module_worker(module: str, *arguments: str, seconds: float, memory_mib: int) -> LimitedWorker:
    """Return a worker that runs `serve(*arguments)` of one of our modules."""
    code = f"from {module} import serve; serve(*{arguments!r})"
    return make_python_worker(code, seconds=seconds, memory_mib=memory_mib)


def make_python_worker(code: str, *, seconds: float, memory_mib: int) -> LimitedWorker:
    """Return a worker that runs Python code in isolated mode, without variables that may hold secrets.

    It finds the packages that this process finds, in the same order: also those of PYTHONPATH and of the user's
    site-packages. Without -S, an installed launcher would come before this one.
    """
    search_path = [str(_SOURCE_ROOT), *(entry for entry in sys.path if entry not in ("", str(Path.cwd())))]
    prepare = f"import sys; sys.path += [entry for entry in {search_path!r} if entry not in sys.path]"
    environment = {key: value for key, value in os.environ.items() if key in _VARIABLES}
    command = [sys.executable, "-I", "-S", "-c", f"{prepare}; {code}"]
    return LimitedWorker(command, environment, seconds=seconds, memory_mib=memory_mib)
