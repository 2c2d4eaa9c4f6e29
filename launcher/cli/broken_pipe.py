"""Output to a pipe whose reader may exit early, as head and less do, without a change of the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TolerantStream:
    """A text stream that discards its output once the reader of the pipe has exited."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or discard it if the reader of the pipe has exited."""
        try:
            self._stream.write(text)
        except BrokenPipeError:
            close_output(self._stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, or discard its buffer if the reader of the pipe has exited."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            close_output(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def tolerate_broken_pipes() -> Iterator[None]:
    """Make stdout and stderr discard output, without a BrokenPipeError, once the reader of the pipe has exited."""
    before = sys.stdout, sys.stderr
    streams: Any = tuple(TolerantStream(stream) for stream in before)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = before


def close_output(stream: Any) -> None:
    """Redirect a stream to /dev/null, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
