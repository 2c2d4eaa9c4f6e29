"""File locks: one training per run directory, one writer per file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.run_paths import RunPaths

# A training whose launcher was killed ends by itself, within seconds.
_WAIT_SECONDS = 20.0
_POLL_SECONDS = 0.2

_held: list[int] = []  # open for as long as this process lives


def lock_run(paths: RunPaths) -> None:
    """Lock a run directory until this process ends."""
    _held.append(_acquire(paths))


@contextmanager
def folder_locked(paths: RunPaths, conflict: str) -> Iterator[None]:
    """Hold the lock of a directory; `conflict` is what another process does that has locked it."""
    descriptor = _acquire(paths, conflict)
    try:
        yield
    finally:
        os.close(descriptor)


def check_unlocked(paths: RunPaths) -> None:
    """Refuse to rewrite the files of a run that is being trained."""
    os.close(_acquire(paths))


def _acquire(paths: RunPaths, conflict: str = "another process is training this run") -> int:
    try:
        descriptor = os.open(paths.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise InputError(
            f"{paths.root}: this run cannot be written to: {error.strerror}",
            hint="a training writes checkpoints and metrics there; check the folder's owner and permissions",
        ) from None
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise InputError(f"{paths.root}: {conflict}", hint="wait for it, or stop it first") from None
            time.sleep(_POLL_SECONDS)
        except OSError:  # a file system without locks
            break
    return descriptor


def is_locked(paths: RunPaths) -> bool | None:
    """Whether a process is training this run, without waiting; None if the file system has no locks."""
    try:
        descriptor = os.open(paths.root / ".lock", os.O_RDONLY | os.O_NONBLOCK)
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
    """Hold an exclusive lock while a file is read, changed and rewritten."""
    descriptor = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
