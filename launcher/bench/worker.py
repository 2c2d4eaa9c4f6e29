"""Worker processes for measurements: each reads a specification file, is controlled by pipes, and has a time limit."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType

from launcher.core.errors import ExitCode, LauncherError, Problem
from launcher.core.frozen_model import Frozen
from launcher.core.processes import make_dependent_environment
from launcher.core.worker import Worker, WorkerError, WorkerFailure

_SECONDS_TO_EXIT = 20.0
_SECONDS_TO_SEND = 20.0
_TAIL_LINES = 12


class Timing(Frozen):
    """Durations and token counts of a worker's timed steps, with MFU, peak memory, GPU utilization and power."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]  # per step, without padding
    num_skipped: int = 0  # steps with non-finite loss or gradients
    data_wait_share: float | None = None
    mfu: float | None = None  # None: no GPU, or its peak is unknown
    peak_gib: float | None = None  # allocated by torch on the GPU; without a GPU, the process's peak RSS
    utilization: float | None = None  # GPU utilization reported by the driver, 0 to 1
    watts: float | None = None
    note: str = ""  # how the measurement deviates from the requested one

    @property
    def tokens_per_second(self) -> float:
        """Median tokens/s of the timed steps, so that one stalled step does not distort it."""
        return median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))


class ChildFailedError(LauncherError):
    """Error of a failed child process; the launcher exits with the child's exit code if it is one of ExitCode."""

    def __init__(self, title: str, problems: tuple[Problem, ...], exit_code: int) -> None:
        """Keep the child's exit code if it is one of ExitCode, else use RUN_FAILED."""
        super().__init__(title, problems)
        self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.RUN_FAILED


class MeasurementFailedError(ChildFailedError):
    """A worker exited without a result; shows the end of its log and carries its exit code."""

    def __init__(self, title: str, log: Path, exit_code: int) -> None:
        """Read the last lines of the worker's log as the problems of this error."""
        super().__init__(title, tuple(Problem(where="", what=line) for line in _read_tail(log)), exit_code)

    @property
    def reason(self) -> str:
        """Why the worker failed, in one line: the launcher's error message, else the last line of the log."""
        if not self.problems:
            return self.title
        first, last = self.problems[0].what, self.problems[-1].what
        return first.removeprefix("error: ") if first.startswith("error: ") else last


class MeasurementTimeoutError(MeasurementFailedError):
    """A worker was killed because it exceeded its time limit."""


class MeasurementProcess:
    """A worker `python -m MODULE SPEC` that writes each result as a line to stdout, and exits when stdin closes."""

    def __init__(self, module: str, spec: Frozen, folder: Path, name: str) -> None:
        """Write the specification to `folder` and start the process; its stderr goes to a log there."""
        folder.mkdir(parents=True, exist_ok=True)
        file, self._log, self._name = folder / f"{name}.json", folder / f"{name}.log", name
        file.write_text(spec.model_dump_json(), encoding="utf-8")
        sys.stdout.flush()
        with self._log.open("wb") as log:
            # -P: files in the working directory must not shadow packages of the same name.
            command = [sys.executable, "-P", "-m", module, str(file)]
            self._worker = Worker(command, environment=make_dependent_environment(), stderr=log)

    def __enter__(self) -> MeasurementProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the process, and kill it first after an error."""
        if kind is not None:
            self.kill()
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._worker.pid

    def send(self, line: str) -> None:
        """Send a command; if the process has died, the next `read` reports it."""
        with suppress(WorkerError):
            self._worker.write_line(line, _SECONDS_TO_SEND)

    def read(self, limit_seconds: float) -> str:
        """Return the next line; raises MeasurementFailedError if the process exits or exceeds the limit."""
        try:
            return self._worker.read_line(limit_seconds)
        except WorkerError as error:
            if error.reason is WorkerFailure.EXITED:
                code = ExitCode.RUN_FAILED if error.returncode is None else error.returncode
                raise MeasurementFailedError(f"{self._name}: measurement failed ({error})", self._log, code) from None
            self.kill()
            title = f"{self._name}: {error}"
            raise MeasurementTimeoutError(title, self._log, ExitCode.RUN_FAILED) from None

    def close(self) -> None:
        """End the process; its memory is free when this returns."""
        self._worker.close(_SECONDS_TO_EXIT)

    def kill(self) -> None:
        """Kill the process and its children."""
        self._worker.kill()


def _read_tail(log: Path) -> list[str]:
    """Return the last `error: ` line of a log and the lines after it, or else the last lines of the log."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            lines = list(deque((line.rstrip() for line in file if line.strip()), maxlen=_TAIL_LINES))
    except OSError:
        return []
    errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    return lines[errors[-1] :] if errors else lines
