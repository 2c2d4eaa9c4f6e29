"""Progress of long operations on stderr: one updated line on a terminal, else a log line every ten seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from launcher.core.log import get_logger
from launcher.core.units import format_duration

log = get_logger(__name__)

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 10.0


class Progress:
    """Progress display of a long operation: items done, items per second and the time left."""

    def __init__(self, total: int | None = None, unit: str = "rows") -> None:
        self._total, self._unit, self._done = total, unit, 0
        self._is_terminal = sys.stderr.isatty()
        self._interval = _TERMINAL_SECONDS if self._is_terminal else _LOG_SECONDS
        self._began = self._shown = time.monotonic()
        self._has_line = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def report(self, message: str) -> None:
        """Log a message."""
        log.info(message)

    def advance(self, count: int, detail: str = "") -> None:
        """Count finished items and show the progress at intervals; `detail` says what is in progress."""
        self._done += count
        now = time.monotonic()
        if now - self._shown < self._interval:
            return
        self._shown = now
        text = self._format(now - self._began) + (f", {detail}" if detail else "")
        if self._is_terminal:
            self._has_line = True
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            log.info(text)

    def _format(self, seconds: float) -> str:
        rate = self._done / max(1e-9, seconds)
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        # The number of rows is an estimate before they are read.
        if not self._total or self._done > self._total:
            return f"{self._done:,} {self._unit}, {speed} {self._unit}/s"
        done = f"{self._done:,} of {self._total:,} {self._unit}"
        if not self._done:
            return done
        return f"{done}, {speed} {self._unit}/s, about {format_duration((self._total - self._done) / rate)} left"
