"""Hashes of files, remembered: a file whose size, inode and times are unchanged is not read again."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.errors import InputError
from launcher.paths import write_text_atomically

_MEMORY_FILE = ".fingerprints.json"
_MOST_ENTRIES = 1000
_READ_BYTES = 1 << 20


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def kernel_lock(path: Path) -> Iterator[None]:
    """One process at a time. The lock is the kernel's: it goes with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def hash_remembered(path: Path, root: Path) -> str:
    """ctime is in the mark: it changes with the content and cannot be set back."""
    stat = path.stat()
    mark = f"{path.resolve()}:{stat.st_size}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    memory = _load(root)
    if mark not in memory:
        memory[mark] = hash_file(path)
        with suppress(OSError, InputError):  # on a read-only or full disk it is hashed again next time
            _remember(root, mark, memory[mark])
    return memory[mark]


def _remember(root: Path, mark: str, digest: str) -> None:
    with kernel_lock(root / ".fingerprints.lock"):
        for rubbish in root.glob(
            f".{_MEMORY_FILE}.*.tmp"
        ):  # of a process that was killed: under the lock nobody writes
            rubbish.unlink(missing_ok=True)
        memory = {**dict(list(_load(root).items())[-_MOST_ENTRIES:]), mark: digest}
        write_text_atomically(root / _MEMORY_FILE, json.dumps(memory, indent=1) + "\n")


def _load(root: Path) -> dict[str, str]:
    try:
        memory = json.loads((root / _MEMORY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(memory, dict) and all(isinstance(value, str) for value in memory.values())
    return memory if is_ours else {}
