"""Prepared data on disk, in folders named by a hash of the inputs. A folder gets this name only when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.core import file_lock
from launcher.core.errors import InputError
from launcher.core.frozen_model import Frozen
from launcher.core.run_files import load_model_or_none, read_text
from launcher.core.run_paths import sync_folder, sync_path, write_text_atomically
from launcher.corpus.audit import Audit
from launcher.corpus.hash_cache import hash_file, hash_file_cached
from launcher.corpus.pack_file import PackFile

AUDIT_FILE = "audit.json"
STORE_FILE = "store.json"
# What was planned when the data was prepared or found, one request per line. Not part of the content of a store.
REQUESTS_FILE = "requests.jsonl"
# Written into each folder when it is created: only a folder with it, or with a valid store.json, is ever deleted. It
# names the store, so that a copy in another folder means nothing.
MARKER_FILE = ".made-by-expert-launcher"
_MARKER_TEXT = "Prepared data {}, made by expert-launcher; `launcher data --prune` may delete this folder.\n"
_STORE_NAME = re.compile(r"[0-9a-f]{16}")
_SCRATCH_NAME = re.compile(r"\.([0-9a-f]{16})\.making-[0-9]+")
_FILE_NAME = re.compile(
    rf"{MARKER_FILE}|{REQUESTS_FILE}|\.?({STORE_FILE}|{AUDIT_FILE})(\.[0-9]+\.tmp)?|[\w-]+\.(arrow|ids|mask)"
)
# Larger files are hashed only once: reading them would slow down every start.
_LARGE_BYTES = 1 << 28
_SHOWN_KEY_DIGITS = 16


class StoredFile(Frozen):
    """Size and hash of a file."""

    num_bytes: int
    sha256: str


class StoreManifest(Frozen):
    """Manifest of a store, written last: it proves that the store is complete."""

    schema_version: Literal[1] = 1
    expert: str
    key: str
    parts: dict[str, str]  # inputs of the key
    files: dict[str, StoredFile]


@dataclass(frozen=True, slots=True)
class Store:
    """One prepared dataset."""

    folder: Path
    manifest: StoreManifest

    def open_split(self, name: str) -> PackFile:
        """Open the packs of a split."""
        return PackFile(self.folder / f"{name}.arrow")

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(name.removesuffix(".arrow") for name in self.manifest.files if name.endswith(".arrow"))

    @property
    def audit(self) -> Audit:
        """The audit of the data."""
        return Audit.model_validate_json((self.folder / AUDIT_FILE).read_text(encoding="utf-8"))

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.manifest.files.values())


def make_key(parts: Mapping[str, str]) -> str:
    """Return the key of prepared data: a hash of its inputs."""
    canonical = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def get_store_dir(root: Path, key: str) -> Path:
    """Return the folder of the prepared data with this key."""
    return root / key[:_SHOWN_KEY_DIGITS]


def find_store(root: Path, key: str) -> Store | None:
    """Return the intact store of a key; None if it is missing or damaged (see `find_damage`)."""
    folder = get_store_dir(root, key)
    if not folder.is_dir() or find_damage(folder) is not None:
        return None
    manifest = load_store_manifest(folder)
    return Store(folder, manifest) if manifest is not None and manifest.key == key else None


def load_store_manifest(folder: Path) -> StoreManifest | None:
    """Load the manifest of a store; None if it is missing or invalid."""
    manifest = load_model_or_none(StoreManifest, folder / STORE_FILE)
    return manifest if manifest is not None and all(map(_FILE_NAME.fullmatch, manifest.files)) else None


def is_store(folder: Path) -> bool:
    """Return whether this program made a folder as a store, complete or damaged. Symbolic links are not followed."""
    if _STORE_NAME.fullmatch(folder.name) is None or not _is_folder(folder):
        return False
    manifest = load_store_manifest(folder)  # versions before 0.2 wrote no marker
    key = "" if manifest is None else make_key(manifest.parts)
    return _has_marker(folder, folder.name) or key.startswith(folder.name)


def find_scratch_key(folder: Path) -> str | None:
    """Return the key of a temporary folder that this program made, or None for any other folder."""
    match = _SCRATCH_NAME.fullmatch(folder.name)
    return match[1] if match and _is_folder(folder) and _has_marker(folder, match[1]) else None


def find_foreign_file(folder: Path) -> str | None:
    """Return why a folder may not be deleted (another owner, a file of another program, unreadable), else None."""
    try:
        if folder.stat().st_uid != os.geteuid():
            return "it belongs to another user"
        for entry in os.scandir(folder):
            if not entry.is_file(follow_symlinks=False) or not _FILE_NAME.fullmatch(entry.name):
                return f"it contains {entry.name}, which this program did not create"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _has_marker(folder: Path, name: str) -> bool:
    marker = folder / MARKER_FILE
    try:
        return not marker.is_symlink() and read_text(marker) == _MARKER_TEXT.format(name)
    except (OSError, InputError):
        return False


def create_marked_dir(folder: Path, key: str) -> None:
    """Create a folder with the marker of this program for the store of a key."""
    folder.mkdir()
    (folder / MARKER_FILE).write_text(_MARKER_TEXT.format(key[:_SHOWN_KEY_DIGITS]), encoding="utf-8")


def find_damage(folder: Path, *, keeps_hashes: bool = True) -> str | None:
    """Return what is wrong with a store, or None. Every file is verified against its hash.

    The hashes of large files are cached as long as size, inode and times are unchanged; `keeps_hashes=False` adds none.
    """
    manifest = load_store_manifest(folder)
    if manifest is None:
        return f"{STORE_FILE} is missing or broken"
    for name, stored in manifest.files.items():
        file = folder / name
        try:
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != stored.num_bytes:
                return f"{name} has {file.stat().st_size} bytes, not {stored.num_bytes}"
            is_large = stored.num_bytes >= _LARGE_BYTES
            if (
                hash_file_cached(file, folder.parent, keeps_hash=keeps_hashes) if is_large else hash_file(file)
            ) != stored.sha256:
                return f"{name} does not match its hash"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def find_stores(root: Path) -> list[Store]:
    """Return all stores in a folder, newest first, without verifying them."""
    if not root.is_dir():
        return []
    stores = []
    for folder in root.iterdir():
        manifest = load_store_manifest(folder) if folder.is_dir() and not folder.name.startswith(".") else None
        if manifest is not None:
            stores.append(Store(folder, manifest))
    return sorted(stores, key=lambda store: store.folder.stat().st_mtime, reverse=True)


def explain_miss(root: Path, parts: Mapping[str, str]) -> str:
    """Return why data must be prepared: the inputs that differ from those of the most similar store."""
    differences = [
        sorted(name for name in {*parts, *other} if parts.get(name) != other.get(name))
        for other in (store.manifest.parts for store in find_stores(root))
    ]
    if not differences:
        return "no data prepared yet"
    nearest = min(differences, key=len)
    return f"changed since the last preparation: {', '.join(nearest)}" if nearest else "the prepared data is damaged"


def _get_lock(root: Path, key: str) -> Path:
    return root / f".{key[:_SHOWN_KEY_DIGITS]}.lock"


def lock_store(root: Path, key: str) -> AbstractContextManager[None]:
    """Return a context manager that holds the lock of a key, so that only one process prepares its data."""
    return file_lock.lock_file(_get_lock(root, key))


def is_locked(root: Path, key: str) -> bool:
    """Return whether a running process prepares the store of this key; True also if that cannot be determined."""
    return file_lock.is_locked(_get_lock(root, key)) is not False


@contextmanager
def make_scratch_dir(root: Path, key: str) -> Iterator[Path]:
    """Create a temporary folder next to the store; under the lock, leftovers of earlier processes are deleted."""
    prefix = f".{key[:_SHOWN_KEY_DIGITS]}.making"
    for leftover in root.glob(f"{prefix}*"):
        if find_scratch_key(leftover) is not None and find_foreign_file(leftover) is None:
            shutil.rmtree(leftover, ignore_errors=True)
    folder = root / f"{prefix}-{os.getpid()}"
    create_marked_dir(folder, key)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(scratch: Path, root: Path, expert: str, parts: Mapping[str, str]) -> Store:
    """Hash and sync all files, write the manifest last, then rename the folder: only a complete store gets its name."""
    key = make_key(parts)
    files = {}
    for path in sorted(scratch.iterdir()):
        if path.name != MARKER_FILE:
            files[path.name] = StoredFile(num_bytes=path.stat().st_size, sha256=hash_file(path))
    manifest = StoreManifest(expert=expert, key=key, parts=dict(sorted(parts.items())), files=files)
    write_text_atomically(scratch / STORE_FILE, manifest.model_dump_json(indent=2) + "\n", redacts=False)
    sync_folder(scratch)
    folder = get_store_dir(root, key)
    if is_store(folder) and find_foreign_file(folder) is None:  # damaged, or it would have been used
        shutil.rmtree(folder)
    elif os.path.lexists(folder):
        raise InputError(
            f"{folder} was not created by this program, or was changed since: it is not replaced",
            hint="move it, and prepare again",
        )
    scratch.rename(folder)
    sync_path(root)
    return Store(folder, manifest)
