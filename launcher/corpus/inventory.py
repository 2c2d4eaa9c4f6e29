"""Inventory of data: datasets in Hugging Face caches, and prepared stores with their state."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.core.errors import InputError
from launcher.corpus.bin_packing import PACKER_VERSION
from launcher.corpus.spec import RULES_VERSION
from launcher.corpus.storage_kind import Storage, probe_storage
from launcher.corpus.store import (
    create_marked_dir,
    find_damage,
    find_foreign_file,
    find_scratch_key,
    get_store_dir,
    is_locked,
    is_store,
    load_store_manifest,
)

StoreState = Literal["current", "stale", "unknown", "damaged", "left over"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedDataset:
    """A dataset in a Hugging Face cache."""

    name: str
    folder: Path
    num_bytes: int
    storage: Storage
    experts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreEntry:
    """A folder of prepared data, complete or left by an interrupted preparation, with its state."""

    folder: Path
    expert: str
    num_bytes: int
    state: StoreState
    reason: str

    @property
    def is_prunable(self) -> bool:
        """Whether `launcher data --prune` deletes this store."""
        return self.state in ("stale", "damaged", "left over")

    @property
    def is_movable(self) -> bool:
        """Whether `launcher data --move-to` moves this store."""
        return self.state in ("current", "unknown", "stale") and not self.folder.name.startswith(".")


# Returns the keys that the requests of a store (what was planned when it was prepared or found) have now; None for one
# that is not known or cannot be planned on this machine.
ComputeKeys = Callable[[Path], Iterable[str | None]]


def get_dataset_cache_dirs(environ: Mapping[str, str], home: Path) -> tuple[Path, ...]:
    """Return the cache folders of huggingface_hub and `datasets`."""
    base = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or base / "hub")
    arrow = Path(environ.get("HF_DATASETS_CACHE") or base / "datasets")
    return tuple(dict.fromkeys((hub, arrow)))


def list_cached_datasets(caches: Iterable[Path], users: Mapping[str, Sequence[str]]) -> list[CachedDataset]:
    """List cached datasets; `users` maps a dataset to the experts whose manifests name it."""
    datasets = []
    for cache in caches:
        for folder in sorted(cache.iterdir()) if cache.is_dir() else ():
            name = _dataset_name(folder)
            if name is not None:
                datasets.append(
                    CachedDataset(
                        name=name,
                        folder=folder,
                        num_bytes=measure_folder(folder),
                        storage=probe_storage(folder),
                        experts=tuple(users.get(name, ())),
                    )
                )
    return datasets


def _dataset_name(folder: Path) -> str | None:
    """Return the dataset of a cache folder, `datasets--org--name` (hub) or `org___name` (`datasets`); else None."""
    if not folder.is_dir():
        return None
    if folder.name.startswith("datasets--"):
        return folder.name.removeprefix("datasets--").replace("--", "/", 1)
    return folder.name.replace("___", "/", 1) if "___" in folder.name else None


def measure_folder(folder: Path) -> int:
    """Return the size of a folder in bytes; symbolic links, as in the hub's snapshots, are not counted."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                status = (Path(root) / name).lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def list_stores(roots: Iterable[Path], compute_keys: ComputeKeys) -> list[StoreEntry]:
    """List the stores of prepared data in `roots` with their state."""
    entries = []
    for root in {root.resolve(): root for root in reversed(list(roots))}.values():
        for folder in _list_folder(root):
            if is_store(folder) or find_scratch_key(folder) is not None:
                state, reason, expert = _find_state(root, folder, compute_keys)
                size = measure_folder(folder)
                entries.append(StoreEntry(folder=folder, expert=expert, num_bytes=size, state=state, reason=reason))
    return sorted(entries, key=lambda entry: entry.folder)


def _list_folder(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # missing, or not readable: nothing in it can be deleted
        return []


def _find_state(root: Path, folder: Path, compute_keys: ComputeKeys) -> tuple[StoreState, str, str]:
    expert = root.name
    foreign = find_foreign_file(folder)
    if foreign is not None:
        return "unknown", foreign, expert
    scratch_key = find_scratch_key(folder)
    if scratch_key is not None:
        if is_locked(root, scratch_key):
            return "current", "being prepared now", expert
        return "left over", "of an interrupted preparation", expert
    manifest = load_store_manifest(folder)
    damage = find_damage(folder, keeps_hashes=False)
    if manifest is None or damage is not None:
        return "damaged", damage or "not a store", expert
    expert = manifest.expert
    if _is_of_older_version(manifest.parts):
        return "stale", "prepared by an older version of the launcher", expert
    is_complete = True
    for key in compute_keys(folder):
        if key == manifest.key:
            return "current", "matches the manifest and flags it was prepared for", expert
        is_complete &= key is not None
    if not is_complete:
        return "unknown", "what it was prepared for is not known, or not on this machine", expert
    return "stale", "manifest, data or tokenizer have changed", expert


def _is_of_older_version(parts: Mapping[str, str]) -> bool:
    """Return whether the inputs of a store's key name an older version of the packing or preparation rules."""
    versions = {"packer": PACKER_VERSION, "rules": RULES_VERSION}
    return any(parts[name].isdecimal() and int(parts[name]) < now for name, now in versions.items() if name in parts)


def remove_entries(entries: Iterable[StoreEntry]) -> list[StoreEntry]:
    """Delete stores and return those that were deleted; raises InputError if one cannot be deleted."""
    removed = []
    for entry in entries:
        if _is_still_prunable(entry):
            _remove(entry.folder)
            removed.append(entry)
    return removed


def _is_still_prunable(entry: StoreEntry) -> bool:
    """Return whether an entry may still be pruned: a process may have begun to prepare its data meanwhile."""
    folder, scratch_key = entry.folder, find_scratch_key(entry.folder)
    if find_foreign_file(folder) is not None or is_locked(folder.parent, scratch_key or folder.name):
        return False
    if entry.state == "damaged":
        return is_store(folder) and find_damage(folder, keeps_hashes=False) is not None
    return is_store(folder) or scratch_key is not None


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be deleted: {error.strerror or error}") from None


def move_store(entry: StoreEntry, old_dir: Path, data_dir: Path) -> Path:
    """Copy a store, verify every byte, then remove the original. Its path relative to the data folder is kept."""
    manifest = load_store_manifest(entry.folder)
    if manifest is None:
        raise InputError(
            f"{entry.folder} does not contain prepared data", hint="`launcher data` lists the folders that do"
        )
    root = data_dir / os.path.relpath(entry.folder.parent, old_dir)
    target = get_store_dir(root, manifest.key)
    if target.exists():
        raise InputError(
            f"{target} already exists: nothing was moved", hint="delete stale stores with `launcher data --prune`"
        )
    scratch = root / f".{target.name}.making-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        create_marked_dir(scratch, manifest.key)
        shutil.copytree(entry.folder, scratch, dirs_exist_ok=True)
        damage = find_damage(scratch)
        if damage is not None:
            raise InputError(f"the copy on {data_dir} is damaged: {damage}", hint="the original was not touched")
        scratch.rename(target)
    except OSError as error:
        # copytree raises a list of all files with their errors as texts.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise InputError(
            f"{entry.folder} cannot be moved to {data_dir}: {reason}", hint="the original was not touched"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _remove(entry.folder)
    return target
