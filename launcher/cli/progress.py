"""Progress bar over rows on stderr, on a terminal only."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from launcher.cli.tables import format_bar
from launcher.core.log import get_logger

log = get_logger(__name__)

_EVERY_SECONDS = 0.2
_BAR_WIDTH = 20


class RowProgress:
    """Rows done, rows per second and the time left."""

    def __init__(self, expected_rows: int | None = None) -> None:
        self._expected = expected_rows
        self._is_shown = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last = 0.0
        self._rows = 0

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown and self._rows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def report(self, message: str) -> None:
        """Log a message."""
        log.info(message)

    def advance(self, rows: int) -> None:
        """Count rows and redraw the bar."""
        self._rows += rows
        now = time.monotonic()
        if self._is_shown and now - self._last >= _EVERY_SECONDS:
            self._last = now
            print(f"\r\033[K{self._format(now - self._started)}", end="", file=sys.stderr, flush=True)

    def _format(self, seconds: float) -> str:
        rate = self._rows / max(1e-9, seconds)
        done = f"{self._rows:,} rows, {rate:,.0f} rows/s"
        if not self._expected or self._rows > self._expected:  # the number of rows is an estimate before they are read
            return done
        bar = format_bar(self._rows / self._expected, _BAR_WIDTH).ljust(_BAR_WIDTH, "░")
        return f"{bar} {done}, about {(self._expected - self._rows) / rate:,.0f} s left"
