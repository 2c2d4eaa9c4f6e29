"""A planned run -> its prepared data: where the launcher stack meets the corpus."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.choices import Profile
from launcher.corpus.current import find_current_key
from launcher.corpus.inventory import (
    CachedDataset,
    CurrentKeys,
    StoreEntry,
    dataset_caches,
    find_cached_datasets,
    find_store_entries,
)
from launcher.corpus.preparation import data_folder, data_root, make_preparation
from launcher.corpus.prepare import Prepared, prepare
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import LauncherError
from launcher.inputs import PlannedRun, Request, base_folders, plan_request
from launcher.manifest import known_experts

# Prepared data does not depend on the hardware; planning wants some all the same.
_ANY_GPU = "h100"
_PROFILES: tuple[Profile, ...] = ("full", "smoke")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInventory:
    datasets: tuple[CachedDataset, ...]
    stores: tuple[StoreEntry, ...]


def take_inventory() -> DataInventory:
    """Of the caches and stores that the experts known here use, and of all others beside them. Nothing is fetched."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported, which has not happened yet
    users: dict[str, list[str]] = {}
    keys: dict[str, CurrentKeys] = {}
    default = data_folder()
    roots = sorted(folder for folder in default.iterdir() if folder.is_dir()) if default.is_dir() else []
    for name in known_experts():
        plans = _plan_profiles(name)
        for planned in plans:
            path = planned.loaded.manifest.training.dataset.path
            if path is not None and name not in users.setdefault(path.partition("::")[0], []):
                users[path.partition("::")[0]].append(name)
            keys[planned.plan.expert] = _current_keys(plans)
            roots.append(data_root(planned.plan))
    caches = dataset_caches(os.environ, Path.home())
    return DataInventory(
        datasets=tuple(find_cached_datasets(caches, users)), stores=tuple(find_store_entries(roots, keys))
    )


def _plan_profiles(expert: str) -> list[PlannedRun]:
    """In both profiles, as far as it can be planned: a broken manifest must not hide everybody's data."""
    plans = []
    for profile in _PROFILES:
        with suppress(LauncherError):
            plans.append(plan_request(Request(expert=expert, gpu=_ANY_GPU, profile=profile)))
    return plans


def _current_keys(plans: Sequence[PlannedRun]) -> CurrentKeys:
    found = [
        find_current_key(planned.plan, planned.loaded.folder, base_folders(planned.loaded.folder)) for planned in plans
    ]
    is_complete = None not in found and len(plans) == len(_PROFILES)
    return CurrentKeys(keys=frozenset(key for key in found if key), is_complete=is_complete)


def prepare_planned(planned: PlannedRun, report: Callable[[str], None], advance: Callable[[int], None]) -> Prepared:
    plan = planned.plan
    folders = base_folders(planned.loaded.folder)
    tokenizer = load_tokenizer(plan.base.name, folders, any_will_do=plan.random_weights)
    return prepare(make_preparation(plan, planned.loaded.folder, tokenizer), report, advance)
