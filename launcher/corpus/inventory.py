"""Which data lies where: datasets in Hugging Face caches, prepared stores, and what nobody needs any more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.corpus.disks import Storage, probe_storage
from launcher.corpus.store import damage_of, is_locked, load_store_manifest, store_folder
from launcher.errors import InputError

StoreState = Literal["current", "stale", "unknown", "damaged", "left over"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedDataset:
    name: str
    folder: Path
    num_bytes: int
    storage: Storage
    experts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreEntry:
    folder: Path
    expert: str
    num_bytes: int
    state: StoreState
    reason: str

    @property
    def is_prunable(self) -> bool:
        return self.state in ("stale", "damaged", "left over")

    @property
    def is_movable(self) -> bool:
        return self.state in ("current", "unknown", "stale") and not self.folder.name.startswith(".")


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentKeys:
    """What an expert's manifest would prepare today, in each profile."""

    keys: frozenset[str]
    is_complete: bool  # False: for some profile it cannot be told here (no tokenizer, no data)


def dataset_caches(environ: Mapping[str, str], home: Path) -> tuple[Path, ...]:
    """Where the hub's client and `datasets` keep what they fetched."""
    base = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or base / "hub")
    arrow = Path(environ.get("HF_DATASETS_CACHE") or base / "datasets")
    return tuple(dict.fromkeys((hub, arrow)))


def find_cached_datasets(caches: Iterable[Path], users: Mapping[str, Sequence[str]]) -> list[CachedDataset]:
    """`users`: dataset -> the experts whose manifests name it."""
    found = []
    for cache in caches:
        for folder in sorted(cache.iterdir()) if cache.is_dir() else ():
            name = _dataset_name(folder)
            if name is not None:
                found.append(
                    CachedDataset(
                        name=name,
                        folder=folder,
                        num_bytes=folder_bytes(folder),
                        storage=probe_storage(folder),
                        experts=tuple(users.get(name, ())),
                    )
                )
    return found


def _dataset_name(folder: Path) -> str | None:
    """`datasets--org--name` in the hub's cache, `org___name` in the one of `datasets`."""
    if not folder.is_dir():
        return None
    if folder.name.startswith("datasets--"):
        return folder.name.removeprefix("datasets--").replace("--", "/", 1)
    return folder.name.replace("___", "/", 1) if "___" in folder.name else None


def folder_bytes(folder: Path) -> int:
    """Real bytes: the snapshots of the hub's cache are links into its blobs, and are not counted twice."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if not path.is_symlink():
                total += path.stat().st_size
    return total


def find_store_entries(roots: Iterable[Path], current_keys: Mapping[str, CurrentKeys]) -> list[StoreEntry]:
    """`current_keys`: by expert."""
    entries = []
    for root in dict.fromkeys(roots):
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if folder.is_dir():
                entries.append(_describe(root, folder, current_keys))
    return entries


def _describe(root: Path, folder: Path, current_keys: Mapping[str, CurrentKeys]) -> StoreEntry:
    state, reason, expert = _judge(root, folder, current_keys)
    return StoreEntry(folder=folder, expert=expert, num_bytes=folder_bytes(folder), state=state, reason=reason)


def _judge(root: Path, folder: Path, current_keys: Mapping[str, CurrentKeys]) -> tuple[StoreState, str, str]:
    expert = root.name
    if folder.name.startswith("."):
        key = folder.name[1:].split(".")[0]
        if is_locked(root, key):
            return "current", "being prepared right now", expert
        return "left over", "of a preparation that was stopped", expert
    manifest = load_store_manifest(folder)
    damage = damage_of(folder)
    if manifest is None or damage is not None:
        return "damaged", damage or "not a store", expert
    expert = manifest.expert
    now = current_keys.get(expert)
    if now is not None and manifest.key in now.keys:
        return "current", "what the expert's manifest would prepare today", expert
    if now is None or not now.is_complete:
        return "unknown", "its expert's data or tokenizer is not here, so nobody can say whether it is used", expert
    return "stale", "the manifest, its data or the tokenizer have changed since", expert


def remove_entries(entries: Iterable[StoreEntry]) -> int:
    freed = 0
    for entry in entries:
        shutil.rmtree(entry.folder)
        freed += entry.num_bytes
    return freed


def move_store(entry: StoreEntry, old_dir: Path, data_dir: Path) -> Path:
    """Copy, check every byte, then remove the old one: a store is whole at one place or the other. It lies as it lay
    in the old folder of all data: manifests may say where."""
    manifest = load_store_manifest(entry.folder)
    if manifest is None:
        raise InputError(f"{entry.folder} is no store")
    root = data_dir / os.path.relpath(entry.folder.parent, old_dir)
    target = store_folder(root, manifest.key)
    if target.exists():
        raise InputError(f"{target} exists already", hint="`launcher data --prune` deletes what is not needed")
    scratch = root / f".{target.name}.making-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.copytree(entry.folder, scratch)
        damage = damage_of(scratch)
        if damage is not None:
            raise InputError(f"the copy on {data_dir} is damaged: {damage}", hint="the original was not touched")
        scratch.rename(target)
    except OSError as error:
        raise InputError(f"{entry.folder} cannot be moved to {data_dir}: {error.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(entry.folder)
    return target
