"""New rows of a metrics file, as they come, each once: also where the file was cut because steps are trained again."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.errors import InputError
from launcher.metrics import TOTAL_SECONDS, StepMetrics, parse_metrics


class Follower:
    """What a row is known by is the run's wall-clock time, which only grows."""

    def __init__(self, file: Path, told_seconds: float = 0.0) -> None:
        self._file = file
        self.told_seconds = told_seconds
        self._inode, self._offset = 0, 0

    def read(self) -> list[StepMetrics]:
        rows = []
        for row in self._parse(self._read_on()):
            seconds = row.values.get(TOTAL_SECONDS, 0.0)
            if seconds > self.told_seconds:
                self.told_seconds = seconds
                rows.append(row)
        return rows

    def _read_on(self) -> str:
        """Whole lines that were not read yet."""
        try:
            with self._file.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or state.st_size < self._offset:
                    self._inode, self._offset = state.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except OSError:  # it is not there yet
            return ""
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace")

    def _parse(self, text: str) -> list[StepMetrics]:
        rows = []
        for line in text.splitlines():
            try:
                rows.append(parse_metrics(line))
            except InputError:  # a line that somebody spoilt: the others are told
                continue
        return rows
