"""Workers of the judges: child processes with a memory limit, killed on a timeout and restarted on the next request."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.core.errors import RunFailedError
from launcher.core.worker import Worker, WorkerError

_SECONDS_TO_START = 60.0
# A shell sets the limits (no core file, no writes to files, data segment) and then becomes the worker.
_LIMITING_SHELL = ("/bin/sh", "-c", 'ulimit -c 0 && ulimit -f 0 && ulimit -d "$0" && exec "$@"')
_SOURCE_ROOT = Path(__file__).resolve().parents[2]


class LimitedWorker:
    """A worker that prints one line when it is ready, and then one line for each line that it receives."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, seconds: float, memory_mib: int
    ) -> None:
        self._command = [*_LIMITING_SHELL, str(memory_mib * 1024), *command]
        self._program = Path(command[0]).name
        self._environment = dict(environment)
        self.seconds = seconds
        self._worker: Worker | None = None

    def request(self, line: str, *, retry: bool = True) -> str:
        """Return the reply to a line; raises WorkerError after a timeout, a crash or too much output.

        A failure may be the fault of an earlier request, so a request that fails in a used process is retried in a
        new one; `retry=False` is for batches whose parts are sent again one by one.
        """
        is_new = self._worker is None
        try:
            return self._request_once(line)
        except WorkerError:
            if is_new or not retry:
                raise
        return self._request_once(line)

    def close(self) -> None:
        """Kill the process, if there is one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _request_once(self, line: str) -> str:
        worker = self._worker or self._start()
        try:
            return worker.request(line, self.seconds)
        except WorkerError:
            self.close()
            raise

    def _start(self) -> Worker:
        worker = self._worker = Worker(self._command, environment=self._environment, cwd="/")
        try:
            worker.read_line(_SECONDS_TO_START)
        except WorkerError as error:
            self.close()
            command = " ".join(self._command[len(_LIMITING_SHELL) + 1 :])
            raise RunFailedError(f"cannot start {self._program} to judge answers: it {error}", hint=command) from None
        return worker


def make_python_worker(module: str, *, seconds: float, memory_mib: int) -> LimitedWorker:
    """Return a worker that runs `serve()` of one of our modules."""
    environment = {key: value for key, value in os.environ.items() if key in {"PATH", "LANG", "PYTHONPATH"}}
    search_path = os.pathsep.join(filter(None, (str(_SOURCE_ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-c", f"from {module} import serve; serve()"]
    return LimitedWorker(command, environment | {"PYTHONPATH": search_path}, seconds=seconds, memory_mib=memory_mib)
