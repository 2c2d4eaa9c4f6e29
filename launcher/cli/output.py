"""Our stdout where its reader may leave, as head and less do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """For output beside a run, whose exit code is what counts: text that nobody reads must not change it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Python flushes at exit: what is left in the buffer must go somewhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
