"""Prepared data on disk, addressed by what it was made from. A folder that exists under its key is whole."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from launcher.corpus.audit import Audit
from launcher.corpus.hashes import hash_file, hash_remembered, kernel_lock
from launcher.corpus.packs import PackFile
from launcher.errors import InputError
from launcher.paths import write_text_atomically
from launcher.values import Frozen

AUDIT_FILE = "audit.json"
STORE_FILE = "store.json"
# Reading this much takes a fraction of a second; more would make a hit slow.
_LARGE_BYTES = 1 << 28
_SHOWN_KEY_DIGITS = 16


class StoredFile(Frozen):
    num_bytes: int
    sha256: str


class StoreManifest(Frozen):
    """Written last: the proof that everything else was."""

    schema_version: Literal[1] = 1
    expert: str
    key: str
    parts: dict[str, str]  # what the key is made of
    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True)
class Store:
    """One prepared data set."""

    folder: Path
    manifest: StoreManifest

    def open_split(self, name: str) -> PackFile:
        return PackFile(self.folder / f"{name}.arrow")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(name.removesuffix(".arrow") for name in self.manifest.files if name.endswith(".arrow"))

    @property
    def audit(self) -> Audit:
        return Audit.model_validate_json((self.folder / AUDIT_FILE).read_text(encoding="utf-8"))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files.values())


def make_key(parts: Mapping[str, str]) -> str:
    canonical = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def store_folder(root: Path, key: str) -> Path:
    return root / key[:_SHOWN_KEY_DIGITS]


def find_store(root: Path, key: str) -> Store | None:
    """The whole, undamaged store of a key, or nothing. A damaged one is as good as none, and says so by `damage_of`."""
    folder = store_folder(root, key)
    if not folder.is_dir() or damage_of(folder) is not None:
        return None
    manifest = load_store_manifest(folder)
    return Store(folder, manifest) if manifest is not None and manifest.key == key else None


def load_store_manifest(folder: Path) -> StoreManifest | None:
    try:
        return StoreManifest.model_validate_json((folder / STORE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return None


def damage_of(folder: Path) -> str | None:
    """What is wrong with a store: every byte of every file is checked against its hash.

    Large files are read once: as long as their size, inode and times stay the same, the hash is remembered.
    """
    manifest = load_store_manifest(folder)
    if manifest is None:
        return f"{STORE_FILE} is missing or broken"
    for name, stored in manifest.files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != stored.num_bytes:
            return f"{name} has {file.stat().st_size} bytes, not {stored.num_bytes}"
        is_large = stored.num_bytes >= _LARGE_BYTES
        if (hash_remembered(file, folder.parent) if is_large else hash_file(file)) != stored.sha256:
            return f"{name} has other bytes than were written"
    return None


def find_stores(root: Path) -> list[Store]:
    """All stores under a root that have a readable manifest, newest first; damage is not looked for."""
    if not root.is_dir():
        return []
    stores = []
    for folder in root.iterdir():
        manifest = load_store_manifest(folder) if folder.is_dir() and not folder.name.startswith(".") else None
        if manifest is not None:
            stores.append(Store(folder, manifest))
    return sorted(stores, key=lambda store: store.folder.stat().st_mtime, reverse=True)


def explain_miss(root: Path, parts: Mapping[str, str]) -> str:
    """Which part of the key differs from the nearest store that is there."""
    nearest: tuple[int, list[str]] | None = None
    for store in find_stores(root):
        differing = sorted(
            name for name in {*parts, *store.manifest.parts} if parts.get(name) != store.manifest.parts.get(name)
        )
        if nearest is None or len(differing) < nearest[0]:
            nearest = (len(differing), differing)
    if nearest is None:
        return "nothing was prepared before"
    return (
        f"changed since it was prepared last: {', '.join(nearest[1])}" if nearest[1] else "the prepared data is damaged"
    )


@contextmanager
def locked(root: Path, key: str) -> Iterator[None]:
    """One process at a time prepares a key."""
    with kernel_lock(root / f".{key[:_SHOWN_KEY_DIGITS]}.lock"):
        yield


def is_locked(root: Path, key: str) -> bool:
    path = root / f".{key[:_SHOWN_KEY_DIGITS]}.lock"
    if not path.exists():
        return False
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def scratch_folder(root: Path, key: str) -> Iterator[Path]:
    """Where a store is made, beside its place. Under the lock, whatever an earlier process left there is rubbish."""
    prefix = f".{key[:_SHOWN_KEY_DIGITS]}.making"
    for rubbish in root.glob(f"{prefix}*"):
        shutil.rmtree(rubbish, ignore_errors=True)
    folder = root / f"{prefix}-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(scratch: Path, root: Path, expert: str, parts: Mapping[str, str]) -> Store:
    """Hash, sync, write the manifest last, rename: from here on the store exists, and is whole."""
    key = make_key(parts)
    files = {}
    for path in sorted(scratch.iterdir()):
        _sync(path)
        files[path.name] = StoredFile(num_bytes=path.stat().st_size, sha256=hash_file(path))
    manifest = StoreManifest(expert=expert, key=key, parts=dict(sorted(parts.items())), files=files)
    write_text_atomically(scratch / STORE_FILE, manifest.model_dump_json(indent=2) + "\n")
    _sync(scratch)
    folder = store_folder(root, key)
    if folder.exists():  # a damaged one: a whole one would have been used
        shutil.rmtree(folder)
    scratch.rename(folder)
    _sync(root)
    return Store(folder, manifest)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_inside(root: Path, wanted: str) -> Path:
    """A path that a manifest names for writing: relative, and inside the data folder."""
    path = root / wanted
    is_inside = path.resolve().is_relative_to(root.resolve())
    if Path(wanted).is_absolute() or not is_inside:
        raise InputError(
            f"training.config.pretokenized_cache: {wanted!r} leads out of the data folder",
            hint="use a relative path; LAUNCHER_DATA_DIR moves the data folder to another disk",
        )
    return path
