"""Prepared data of planned runs, and the inventory of all data on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.core.errors import LauncherError
from launcher.core.run_files import open_log, parse_model, read_text
from launcher.core.run_paths import get_home
from launcher.corpus.end_token import note_disagreement
from launcher.corpus.inventory import (
    CachedDataset,
    StoreEntry,
    get_dataset_cache_dirs,
    list_cached_datasets,
    list_stores,
)
from launcher.corpus.prepare import Prepared, prepare
from launcher.corpus.spec import DEFAULT_FOLDER, compute_current_key, get_stores_dir, make_preparation_spec
from launcher.corpus.store import REQUESTS_FILE
from launcher.corpus.tokenizer import load_planned_tokenizer
from launcher.manifest import find_manifest, list_experts, load_manifest
from launcher.manifest.cache_dir import resolve_cache_dir
from launcher.request.request import PlannedRun, Request, base_folders, format_request, plan_request

# Prepared data does not depend on the hardware, but a plan needs some.
_ANY_GPU = "h100"
_ANY_LENGTH = 512  # of rows: counting their tokens takes most of the time
_MAX_REQUESTS = 50  # per store, the latest


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInventory:
    """Datasets in Hugging Face caches, and stores (folders of prepared data)."""

    datasets: tuple[CachedDataset, ...]
    stores: tuple[StoreEntry, ...]


def take_inventory() -> DataInventory:
    """List all cached datasets and prepared data with the experts that use them, without downloading anything."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported, which has not happened yet
    users: dict[str, list[str]] = {}
    default = get_stores_dir()
    roots = [folder for folder in default.iterdir() if not folder.is_symlink()] if default.is_dir() else []
    for name in list_experts():
        with suppress(LauncherError):  # a broken manifest must not hide other experts' data
            manifest = load_manifest(find_manifest(name)).manifest
            if (path := manifest.training.dataset.path) is not None:
                users.setdefault(path.partition("::")[0], []).append(name)
            cache = manifest.training.config.pretokenized_cache
            roots.append(resolve_cache_dir(cache or f"{DEFAULT_FOLDER}/{manifest.expert}"))
    caches = get_dataset_cache_dirs(os.environ, get_home())
    return DataInventory(
        datasets=tuple(list_cached_datasets(caches, users)), stores=tuple(list_stores(roots, _compute_requested_keys))
    )


def _compute_requested_keys(store: Path) -> Iterator[str | None]:
    """Yield the keys that the requests of a store would have now, None for one that cannot be planned here."""
    try:
        lines = read_text(store / REQUESTS_FILE).splitlines()
        requests = [parse_model(Request, line, store / REQUESTS_FILE) for line in lines[-_MAX_REQUESTS:]]
    except LauncherError:
        requests = []
    if not requests:
        yield None
    for request in reversed(requests):
        # The smoke profile chooses its sequence length by the length of rows.
        length = None if request.profile == "smoke" else _ANY_LENGTH
        with suppress(LauncherError, UnicodeEncodeError):  # a path that this locale cannot encode
            planned = plan_request(replace(request, gpu=_ANY_GPU, tokens_per_row=length))
            folder = planned.loaded.folder
            yield compute_current_key(planned.plan, folder, base_folders(folder))
            continue
        yield None


def _remember_request(store: Path, planned: PlannedRun) -> None:
    """Add what was planned to the requests of a store, so that `launcher data` knows whether it is still in use."""
    request = planned.request
    own = Request(
        expert=str(planned.loaded.path),
        overrides=request.overrides,
        base=request.base,
        max_steps=request.max_steps,
        profile=planned.plan.profile,
    )
    line = json.dumps(json.loads(format_request(own)), sort_keys=True)
    with suppress(OSError, LauncherError):  # data of others can be read only
        if not (store / REQUESTS_FILE).exists() or line not in read_text(store / REQUESTS_FILE).splitlines():
            with open_log(store / REQUESTS_FILE) as file:
                file.write(f"{line}\n".encode())


def prepare_planned(planned: PlannedRun, report: Callable[[str], None], advance: Callable[[int], None]) -> Prepared:
    """Tokenize and pack a planned run's data, or return it from the cache if it was prepared before."""
    plan = planned.plan
    folders = base_folders(planned.loaded.folder)
    tokenizer = load_planned_tokenizer(plan, folders)
    spec = make_preparation_spec(plan, planned.loaded.folder, tokenizer)
    for note in note_disagreement(spec.template, tokenizer):
        report(f"note: {note}")
    prepared = prepare(spec, report, advance)
    _remember_request(prepared.store.folder, planned)
    return prepared
