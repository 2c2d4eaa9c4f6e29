"""Rows done and rows a second, on stderr; a moving line on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_EVERY_SECONDS = 0.2


class RowProgress:
    def __init__(self) -> None:
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
        print(message, file=sys.stderr, flush=True)

    def advance(self, rows: int) -> None:
        self._rows += rows
        now = time.monotonic()
        if self._is_shown and now - self._last >= _EVERY_SECONDS:
            self._last = now
            rate = self._rows / max(1e-9, now - self._started)
            print(f"\r\033[K{self._rows:,} rows, {rate:,.0f} rows/s", end="", file=sys.stderr, flush=True)
