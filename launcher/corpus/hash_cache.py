"""Cached file hashes: a file with unchanged size, inode and times is not read again."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.file_lock import lock_file
from launcher.core.run_files import read_text
from launcher.core.run_paths import write_text_atomically

_CACHE_FILE = ".fingerprints.json"
_MAX_ENTRIES = 1000


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_file_cached(path: Path, root: Path, *, keeps_hash: bool = True) -> str:
    """Return the SHA-256 of a file, cached by path, size, inode, mtime and ctime (which programs cannot set).

    A new hash is stored in the folder `root`, unless `keeps_hash` is False.
    """
    key, cache = _make_key(path), _load(root)
    if key not in cache:
        cache[key] = hash_file(path)
        if not keeps_hash:
            return cache[key]
        with suppress(OSError, InputError):  # read-only or full disk: hashed again next time
            _store(root, key, cache[key])
    return cache[key]


def is_hash_cached(path: Path, root: Path) -> bool:
    """Return whether the hash of a file is known without reading the file."""
    return _make_key(path) in _load(root)


def _make_key(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()}:{stat.st_size}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _store(root: Path, key: str, digest: str) -> None:
    with lock_file(root / ".fingerprints.lock"):
        for leftover in root.glob(f".{_CACHE_FILE}.*.tmp"):  # left by a killed process
            leftover.unlink(missing_ok=True)
        cache = {**dict(list(_load(root).items())[-_MAX_ENTRIES:]), key: digest}
        write_text_atomically(root / _CACHE_FILE, json.dumps(cache, indent=1) + "\n", redacts=False)


def _load(root: Path) -> dict[str, str]:
    try:
        cache = json.loads(read_text(root / _CACHE_FILE))
    except (InputError, ValueError, RecursionError):
        return {}
    is_ours = isinstance(cache, dict) and all(isinstance(value, str) for value in cache.values())
    return cache if is_ours else {}
