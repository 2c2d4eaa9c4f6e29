"""Follow a run directory from another process: new rows of its metrics, and the end of its training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.log import configure
from launcher.core.metrics import TOTAL_SECONDS, StepMetrics, parse_metrics
from launcher.core.run_files import open_log
from launcher.runs.record import Outcome
from launcher.training.runtime.process_output import redact_output

POLL_SECONDS = 0.5


class MetricsTail:
    """Reads new rows of a metrics file, each once, even after the file was truncated to repeat steps.

    Rows are identified by the run's wall-clock time, which only increases.
    """

    def __init__(self, file: Path, logged_seconds: float = 0.0) -> None:
        """Skip rows that are already logged: those up to `logged_seconds` of the run's wall-clock time."""
        self._file = file
        self.logged_seconds = logged_seconds
        self._inode, self._offset = 0, 0

    def read(self) -> list[StepMetrics]:
        """Return the rows that were written since the last call."""
        rows = []
        for line in self._read_lines():
            try:
                row = parse_metrics(line)
            except InputError:  # a damaged line: the others are still logged
                continue
            seconds = row.values.get(TOTAL_SECONDS, 0.0)
            if seconds > self.logged_seconds:
                self.logged_seconds = seconds
                rows.append(row)
        return rows

    def _read_lines(self) -> list[str]:
        """Return complete new lines."""
        try:
            with self._file.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or state.st_size < self._offset:
                    self._inode, self._offset = state.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not written yet
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace").splitlines()


def has_ended(parent: int, outcome: Outcome | None) -> bool:
    """Whether the training process `parent` has ended; always True for 0, which means to log an existing run."""
    if parent == 0 or os.getppid() != parent:
        return True
    return outcome is not None and outcome.is_final and outcome.pid == parent


def detach_uploader(log_file: Path, parent: int) -> int:
    """Ignore stop signals and send the output of libraries to a log; return a descriptor of the console.

    Our messages go to the console until the training `parent` has ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of a stopped run is logged, too
    sys.stderr.flush()
    console_fd = os.dup(2)
    with suppress(OSError), open_log(log_file) as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(console_fd, "w", buffering=1)
    redact_output()
    configure()
    if parent:
        threading.Thread(target=_close_console_with_parent, args=(console_fd, parent), daemon=True).start()
    return console_fd


def _close_console_with_parent(console_fd: int, parent: int) -> None:
    """Release the console when the training ends, so that a reader of its output does not wait for the upload."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), console_fd)
