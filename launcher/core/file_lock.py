"""File locks: one training per run directory, one writer per file."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.run_files import open_regular
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
    """Hold the lock of a directory; `conflict` is the error message if another process holds it."""
    descriptor = _acquire(paths, conflict)
    try:
        yield
    finally:
        os.close(descriptor)


def check_unlocked(paths: RunPaths) -> None:
    """Raise InputError if another process is training this run, whose files must then not be rewritten."""
    os.close(_acquire(paths))


def _acquire(paths: RunPaths, conflict: str = "another process is training this run") -> int:
    try:
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise InputError(
            f"{paths.root}: this run cannot be written to: {error.strerror}",
            hint="training runs write checkpoints and metrics there; check the folder's owner and permissions",
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


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds a lock file, without waiting for it; None if the file cannot be read or locked."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def locked(file: Path) -> AbstractContextManager[None]:
    """Hold an exclusive lock while a file is read, changed and rewritten."""
    return lock_file(file.with_name(f".{file.name}.lock"))


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive flock, which the kernel releases when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"{path} is a symbolic link, which cannot be a lock file", hint="delete it") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
