"""Prepared data of planned runs, and the inventory of all data on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from launcher.core.choices import Profile
from launcher.core.errors import LauncherError
from launcher.core.run_paths import get_home
from launcher.corpus.end_token import note_disagreement
from launcher.corpus.inventory import (
    CachedDataset,
    CurrentKeys,
    StoreEntry,
    get_dataset_cache_dirs,
    list_cached_datasets,
    list_stores,
)
from launcher.corpus.prepare import Prepared, prepare
from launcher.corpus.spec import compute_current_key, get_expert_stores_dir, get_stores_dir, make_preparation_spec
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.manifest import list_experts
from launcher.request.request import PlannedRun, Request, base_folders, plan_request

# Prepared data does not depend on the hardware, but a plan needs some.
_ANY_GPU = "h100"
# Counting tokens takes most of the time of a plan. Data depends on their number only in the smoke profile, where it
# decides the maximum length.
_ANY_LENGTH = 512
_PROFILES: dict[Profile, int | None] = {"full": _ANY_LENGTH, "smoke": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInventory:
    """Datasets in Hugging Face caches, and stores (folders of prepared data)."""

    datasets: tuple[CachedDataset, ...]
    stores: tuple[StoreEntry, ...]


def take_inventory() -> DataInventory:
    """List all cached datasets and prepared data with the experts that use them, without downloading anything."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported, which has not happened yet
    users: dict[str, list[str]] = {}
    keys: dict[str, CurrentKeys] = {}
    default = get_stores_dir()
    roots = [folder for folder in default.iterdir() if not folder.is_symlink()] if default.is_dir() else []
    for name in list_experts():
        plans = _plan_profiles(name)
        for planned in plans:
            path = planned.loaded.manifest.training.dataset.path
            if path is not None and name not in users.setdefault(path.partition("::")[0], []):
                users[path.partition("::")[0]].append(name)
            with suppress(LauncherError):
                roots.append(get_expert_stores_dir(planned.plan))
        for expert in {planned.plan.expert for planned in plans}:
            keys[expert] = _merge(keys.get(expert), _current_keys(plans))
    caches = get_dataset_cache_dirs(os.environ, get_home())
    return DataInventory(datasets=tuple(list_cached_datasets(caches, users)), stores=tuple(list_stores(roots, keys)))


def _plan_profiles(expert: str) -> list[PlannedRun]:
    """Plan an expert's full and smoke profiles; skip errors: a broken manifest must not hide other experts' data."""
    plans = []
    for profile, length in _PROFILES.items():
        with suppress(LauncherError):
            plans.append(plan_request(Request(expert=expert, gpu=_ANY_GPU, profile=profile, tokens_per_row=length)))
    return plans


def _merge(one: CurrentKeys | None, other: CurrentKeys) -> CurrentKeys:
    """Combine the data keys of two manifests of the same expert, so that the data of neither counts as stale."""
    if one is None:
        return other
    return CurrentKeys(keys=one.keys | other.keys, is_complete=one.is_complete and other.is_complete)


def _current_keys(plans: Sequence[PlannedRun]) -> CurrentKeys:
    keys = [
        compute_current_key(planned.plan, planned.loaded.folder, base_folders(planned.loaded.folder))
        for planned in plans
    ]
    is_complete = None not in keys and len(plans) == len(_PROFILES)
    return CurrentKeys(keys=frozenset(key for key in keys if key), is_complete=is_complete)


def prepare_planned(planned: PlannedRun, report: Callable[[str], None], advance: Callable[[int], None]) -> Prepared:
    """Tokenize and pack a planned run's data, or return it from the cache if it was prepared before."""
    plan = planned.plan
    folders = base_folders(planned.loaded.folder)
    tokenizer = load_planned_tokenizer(plan, folders)
    spec = make_preparation_spec(plan, planned.loaded.folder, tokenizer)
    for note in note_disagreement(spec.template, tokenizer):
        report(f"note: {note}")
    return prepare(spec, report, advance)
