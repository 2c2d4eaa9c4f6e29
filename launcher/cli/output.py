"""Our streams where their reader may leave, as head and less do: text that nobody reads changes no exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LastingStream:
    """Goes on without a word where its reader is gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except BrokenPipeError:
            drop_output(self._stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            drop_output(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    streams: Any = tuple(LastingStream(stream) for stream in before)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = before


def drop_output(stream: Any) -> None:
    """Python flushes at exit: what is left in the buffer must go somewhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
