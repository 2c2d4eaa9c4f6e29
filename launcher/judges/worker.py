"""Workers of the judges: confined child processes, killed on a timeout and restarted on the next request."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.core.errors import RunFailedError
from launcher.core.worker import Worker, WorkerError
from launcher.judges.sandbox import make_sandboxed_command

_SECONDS_TO_START = 60.0
_SOURCE_ROOT = Path(__file__).resolve().parents[2]


class LimitedWorker:
    """A worker that prints one line when it is ready, and then one line for each line that it receives."""

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
            program, hint = Path(self._command[0]).name, " ".join(self._command)
            raise RunFailedError(f"cannot start {program} to judge answers: it {error}", hint=hint) from None
        return worker


def make_python_worker(module: str, *, seconds: float, memory_mib: int) -> LimitedWorker:
    """Return a worker that runs `serve()` of one of our modules."""
    environment = {key: value for key, value in os.environ.items() if key in {"PATH", "LANG", "PYTHONPATH"}}
    search_path = os.pathsep.join(filter(None, (str(_SOURCE_ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-c", f"from {module} import serve; serve()"]
    return LimitedWorker(command, environment | {"PYTHONPATH": search_path}, seconds=seconds, memory_mib=memory_mib)
