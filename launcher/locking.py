"""One training a run directory: two would write into each other's checkpoints and metrics. And one writer a file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import InputError
from launcher.paths import RunPaths

# A training whose launcher was killed ends by itself, within seconds.
_WAIT_SECONDS = 20.0
_LOOK_EVERY_SECONDS = 0.2

_held: list[int] = []  # open for as long as this process lives


def lock_run(paths: RunPaths) -> None:
    """Held until the process ends, however it ends."""
    _held.append(_take(paths))


def check_unlocked(paths: RunPaths) -> None:
    """Before the files of a run are written anew: those of one that is being trained are its own."""
    os.close(_take(paths))


def _take(paths: RunPaths) -> int:
    try:
        descriptor = os.open(paths.root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(
            f"{paths.root}: this run cannot be written to: {error.strerror}",
            hint="a training writes checkpoints and metrics there; look at the folder's owner and rights",
        ) from None
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise InputError(
                    f"{paths.root}: another process trains this run", hint="wait for it, or stop it first"
                ) from None
            time.sleep(_LOOK_EVERY_SECONDS)
        except OSError:  # a file system that cannot lock: nothing is known
            break
    return descriptor


def is_locked(paths: RunPaths) -> bool | None:
    """Whether a process trains this run right now; None where its file system cannot tell. Waits for nobody."""
    try:
        descriptor = os.open(paths.root / ".lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """While a file is read, changed and written again: whoever else does so waits."""
    descriptor = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
