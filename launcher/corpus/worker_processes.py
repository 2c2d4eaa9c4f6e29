"""Apply a function to chunks of rows in forked processes, in order, with few chunks in memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from launcher.core.errors import InputError
from launcher.core.processes import exit_after_parent

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MAX_WORKERS = 16
_MIN_CORES = 4  # with fewer, the tokenizer's own threads and the reading process use them all

# The function of the workers, which they inherit by the fork: tokenizers and templates are not pickled.
_function: Callable[[Any], Any] | None = None


def count_workers() -> int:
    """Return the number of worker processes to use; 1 if forking is not safe or does not pay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    # A lock that another thread holds would stay locked in a forked process.
    is_safe = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
    return min(cores - 1, _MAX_WORKERS) if is_safe and cores >= _MIN_CORES else 1


def map_in_processes(
    function: Callable[[_Item], _Result], items: Iterator[_Item], num_workers: int
) -> Iterator[_Result]:
    """Apply a function to items in worker processes and yield the results in order; about two items per worker wait."""
    global _function
    _function = function
    pool = ProcessPoolExecutor(
        num_workers, mp_context=multiprocessing.get_context("fork"), initializer=_start, initargs=(os.getpid(),)
    )
    waiting: deque[Future[_Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_apply, item))
            if len(waiting) > 2 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise InputError(
            "a process that tokenizes rows was killed", hint="it probably ran out of memory: close other programs"
        ) from None
    finally:
        _function = None
        pool.shutdown(cancel_futures=True)


def _start(parent: int) -> None:
    """Set up a worker process, which ignores Ctrl-C, because the parent handles it, and exits when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    exit_after_parent(parent)


def _apply(item: Any) -> Any:
    assert _function is not None
    return _function(item)
