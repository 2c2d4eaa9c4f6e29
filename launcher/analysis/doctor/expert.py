"""Check an expert's plan against this machine: workers, memory, rows, weights, space for checkpoints, time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.analysis.doctor.findings import Finding, Reporter
from launcher.analysis.doctor.host import SHM_FOLDER
from launcher.base_models.catalogue import TINY_BASE_NAME, find_config, get_hub_cache
from launcher.base_models.missing_files import describe_missing_tokenizer
from launcher.core.errors import LauncherError
from launcher.core.units import MIB, format_count, format_duration, format_gib
from launcher.core.worker import call_with_timeout
from launcher.corpus.first_rows import probe_rows
from launcher.corpus.sources import make_file_source
from launcher.corpus.storage_kind import probe_storage
from launcher.plan.checkpoints import count_state_bytes
from launcher.plan.estimate.dataset_size import SAMPLE_TRAIN
from launcher.plan.model import Plan
from launcher.request.request import PlannedRun, base_folders

_SECONDS = 3.0
_COUNTED_BYTES = 256 * MIB  # of rows: in larger files their number is estimated from the size
_FEW, _MANY = 0.9, 1.1  # rows found over rows stated in the manifest
_ESTIMATE_SLACK = 0.15
_SAVED_BYTES = 2  # published base models have 16-bit weights
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_BATCH_BYTES_PER_TOKEN = 48  # tokens, positions, targets and masks, 64 bits each
_THIN = 0.03  # share of the GPU memory left in addition to the headroom

WeightsState = Literal["here", "to download", "no weights", "drawn"]
_report = Reporter("expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """Number of rows found in the data, and the number stated in the manifest."""

    file: str | None  # file or prepared store; None: downloaded from the Hub
    num_rows: int | None
    is_counted: bool
    stated: int | None  # by the manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFacts:
    """Plan of an expert, and the data, weights and disk space that this machine has for it."""

    plan: Plan
    rows: RowFacts
    missing_tokenizer: str = ""  # empty: the base has one, or it is downloaded
    weights: WeightsState
    weights_at: str
    weights_free_bytes: int | None  # where they would be downloaded to
    runs_free_bytes: int | None
    shm_free_bytes: int | None  # None: no shared memory
    is_offline: bool  # HF_HUB_OFFLINE is set


def probe_expert(planned: PlannedRun, runs_dir: Path, environ: Mapping[str, str] = os.environ) -> ExpertFacts:
    """Collect the plan, rows, tokenizer and weights that an expert needs to be trained on this machine."""
    plan = planned.plan
    state, place = _find_weights(plan, base_folders(planned.loaded.folder))
    return ExpertFacts(
        plan=plan,
        rows=_count_rows(planned),
        missing_tokenizer=describe_missing_tokenizer(
            planned.loaded.manifest.base.name, base_folders(planned.loaded.folder)
        ),
        weights=state,
        weights_at=place,
        weights_free_bytes=_get_free_bytes(get_hub_cache()),
        runs_free_bytes=_get_free_bytes(runs_dir),
        shm_free_bytes=_get_free_bytes(SHM_FOLDER),
        is_offline=environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"),
    )


def _get_free_bytes(folder: Path) -> int | None:
    try:
        return call_with_timeout(lambda: probe_storage(folder).free_bytes, _SECONDS)
    except OSError:  # or TimeoutError
        return None


def _find_weights(plan: Plan, folders: tuple[Path, ...]) -> tuple[WeightsState, str]:
    if plan.random_weights:
        return "drawn", plan.base.name
    if plan.base.name == TINY_BASE_NAME:
        return "here", "the package"
    config = find_config(plan.base.name, folders)
    if config is None:
        return "to download", plan.base.name
    if any(any(config.parent.glob(pattern)) for pattern in _WEIGHTS):
        return "here", str(config.parent)
    return ("to download", plan.base.name) if "snapshots" in config.parts else ("no weights", str(config.parent))


def _count_rows(planned: PlannedRun) -> RowFacts:
    dataset, folder = planned.loaded.manifest.training.dataset, planned.loaded.folder
    is_smoke = planned.plan.profile == "smoke"
    name = planned.plan.data.path
    stated = None if is_smoke else dataset.stated_train_rows
    file = folder / name if name else None
    if file is None or not file.is_file():
        if is_smoke and name == SAMPLE_TRAIN:
            return RowFacts(file=str(file), num_rows=0, is_counted=True, stated=None)
        return _count_prepared(planned.plan, stated)
    if file.stat().st_size > _COUNTED_BYTES:
        estimate = probe_rows(dataset, folder)
        return RowFacts(file=str(file), num_rows=estimate.num_rows, is_counted=False, stated=stated)
    rows = sum(1 for _ in make_file_source(file, planned.plan.data.format).read())
    return RowFacts(file=str(file), num_rows=rows, is_counted=True, stated=stated)


def _count_prepared(plan: Plan, stated: int | None) -> RowFacts:
    """Count rows of a Hub dataset in its newest prepared store, if there is one."""
    nothing = RowFacts(file=None, num_rows=None, is_counted=False, stated=stated)
    try:
        from launcher.corpus.spec import get_expert_stores_dir
        from launcher.corpus.store import Store, load_store_manifest

        name = (plan.data.path or "").partition("::")[0]
        root = get_expert_stores_dir(plan)
        folders = sorted(root.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in folders:
            manifest = load_store_manifest(folder)
            if manifest is not None and manifest.parts.get("data (train)", "").startswith(f"hub:{name}:"):
                rows = Store(folder, manifest).audit.splits["train"].num_rows
                return RowFacts(file=str(folder), num_rows=rows, is_counted=True, stated=stated)
    except (ImportError, OSError, LauncherError, ValueError, KeyError):
        return nothing
    return nothing


def check_expert(facts: ExpertFacts) -> Iterator[Finding]:
    """Check whether an expert's plan can run on this machine."""
    yield _check_workers(facts.plan)
    yield from _check_shared_memory(facts)
    yield _check_memory(facts.plan)
    yield _check_rows(facts.rows)
    yield _check_weights(facts)
    if facts.missing_tokenizer and not facts.plan.random_weights:
        why, way_out = "the run would fail when it prepares the rows", "copy tokenizer.json into that folder"
        yield _report.problem("tokenizer", facts.missing_tokenizer, why, way_out)
    yield _check_checkpoints(facts)
    yield from _check_host_memory(facts.plan)
    yield _check_time(facts.plan)


def _check_workers(plan: Plan) -> Finding:
    ranks = max(1, plan.hardware.gpus_per_node)
    cores, workers = plan.hardware.cpu_cores_per_node, plan.loader.num_workers * ranks
    plural = "" if plan.loader.num_workers == 1 else "s"
    each = f"{plan.loader.num_workers} loader worker{plural}" + (f" for each of {ranks} ranks" if ranks > 1 else "")
    found = f"{each}, {cores} cores"
    if workers + ranks <= cores or not workers:
        return _report.ok("workers", found)
    fits = max(0, cores // ranks - 1)
    return _report.problem(
        "workers",
        f"{found}: {workers + ranks} processes compete for them",
        "workers slow down the process that drives the GPU",
        f"--set training.config.dataloader_num_workers={fits}, or more cores",
    )


def _check_shared_memory(facts: ExpertFacts) -> Iterator[Finding]:
    """Check whether the prefetched batches of all ranks on this machine fit in its shared memory."""
    loader, batch = facts.plan.loader, facts.plan.batch
    ahead = loader.num_workers * (1 + (loader.prefetch_factor or 0)) * max(1, facts.plan.hardware.gpus_per_node)
    need = ahead * batch.micro_batch_size * batch.sequence_length * _BATCH_BYTES_PER_TOKEN
    if facts.shm_free_bytes is not None and need > facts.shm_free_bytes:
        yield _report.problem(
            "shared memory",
            f"{ahead} prefetched batches, {format_gib(need)}; {format_gib(facts.shm_free_bytes)} are free",
            "a worker dies with a bus error when it is full",
            "docker run --shm-size=8g, or --set training.config.dataloader_num_workers=0",
        )


def _check_memory(plan: Plan) -> Finding:
    memory = plan.memory
    what = "GPU memory" if plan.hardware.gpu is not None else "memory"
    found = (
        f"predicted use {format_gib(memory.total_bytes)} of {format_gib(memory.free_bytes)} free {what}, "
        f"{format_gib(memory.margin_bytes)} unused in addition to {format_gib(memory.headroom_bytes)} headroom"
    )
    held = memory.device_bytes - memory.free_bytes
    if plan.hardware.gpu is not None and held > 0.1 * memory.device_bytes:
        why = f"other processes use {format_gib(held)}: on a free GPU the plan would be larger and faster"
        return _report.note(what, found, why, "the GPU section of this report names them")
    if memory.margin_bytes < _THIN * memory.device_bytes and plan.oom_fallbacks:
        fallback = plan.oom_fallbacks[0]
        return _report.ok(what, f"{found}; OOM fallback: {fallback.action}, {format_gib(fallback.predicted_bytes)}")
    return _report.ok(what, found)


def _check_rows(rows: RowFacts) -> Finding:
    if rows.file is None:
        stated = "" if rows.stated is None else f"; the manifest states {rows.stated:,} rows"
        return _report.ok("rows", f"not on this disk; the run downloads them{stated}")
    about = "" if rows.is_counted else "about "
    found = f"{about}{rows.num_rows or 0:,} in {rows.file}"
    if not rows.num_rows:
        return _report.problem("rows", found, "there is nothing to train on", "download or create the file again")
    if rows.stated is None:
        return _report.ok("rows", found)
    found += f", the manifest states {rows.stated:,}"
    slack = 0.0 if rows.is_counted else _ESTIMATE_SLACK
    ratio = rows.num_rows / rows.stated
    if ratio < _FEW - slack:
        why = "the file may be truncated; steps, time and learning-rate schedule depend on it"
        return _report.problem("rows", found, why, "download it again, or correct training.dataset.splits.train")
    if ratio > _MANY + slack:
        why = "plans made without the file assume fewer"
        return _report.note("rows", found, why, "correct training.dataset.splits.train")
    return _report.ok("rows", found)


def _check_weights(facts: ExpertFacts) -> Finding:
    plan = facts.plan
    if facts.weights == "drawn":
        return _report.ok("base", f"{facts.weights_at}: random weights from a seed, nothing is loaded")
    if facts.weights == "here":
        return _report.ok("base", f"{plan.base.name} in {facts.weights_at}")
    if facts.weights == "no weights":
        return _report.problem(
            "base",
            f"{facts.weights_at} has a config.json, but no weights (*.safetensors)",
            "the run would fail when it loads them",
            "download them there; --random-weights measures speed and memory without them",
        )
    size = plan.base.num_parameters * _SAVED_BYTES
    found = f"{plan.base.name} is not on this disk: {format_gib(size)} to download"
    if facts.is_offline:
        return _report.problem(
            "base",
            f"{found}, and HF_HUB_OFFLINE forbids it",
            "the run would fail when it loads them",
            "unset HF_HUB_OFFLINE once, or set LAUNCHER_MODELS_DIR to a folder with the model",
        )
    room = facts.weights_free_bytes
    if room is not None and room < 1.1 * size:
        why = "the download would fill the disk of the Hugging Face cache"
        return _report.problem("base", f"{found}, {format_gib(room)} free", why, "export HF_HOME=DIR on another disk")
    return _report.ok("base", found)


def _check_checkpoints(facts: ExpertFacts) -> Finding:
    plan = facts.plan
    one = plan.adapter.trainable_parameters * count_state_bytes(plan.precision.trainable_dtype, plan.optimizer.name)
    kept = 1 + (plan.schedule.save_total_limit or 3)  # the new one is complete before an old one is deleted
    need = kept * one + plan.adapter.trainable_parameters * 4
    found = f"{format_gib(one)} each, {format_gib(need)} for {kept} and the trained weights"
    if facts.runs_free_bytes is None:
        return _report.ok("checkpoints", found)
    found += f"; {format_gib(facts.runs_free_bytes)} free"
    if facts.runs_free_bytes < need:
        return _report.problem(
            "checkpoints",
            found,
            "the run fails if a checkpoint cannot be written",
            "choose a folder on another disk with --runs-dir, or --set training.config.save_total_limit=1",
        )
    return _report.ok("checkpoints", found)


def _check_host_memory(plan: Plan) -> Iterator[Finding]:
    ranks = max(1, plan.hardware.gpus_per_node)
    have = plan.hardware.ram_gib_per_node * 1024 * MIB
    need = plan.memory.host_bytes * ranks + plan.memory.saving_bytes
    found = f"{format_gib(need)} of {format_gib(have)}"
    if need > have:
        yield _report.problem(
            "CPU memory",
            found,
            "saving copies weights and optimizer states to CPU memory"
            + (", in addition to what is offloaded" if plan.memory.host_bytes else "")
            + ": the kernel would kill the run",
            "a machine with more CPU memory, or an adapter (lora) instead of full fine-tuning",
        )
    elif need > 0.5 * have:
        yield _report.note("CPU memory", found, "saving takes more than half of the available memory")


def _check_time(plan: Plan) -> Finding:
    speed = plan.speed
    if speed.total_seconds is None or speed.tokens_per_second is None:
        return _report.ok("time", speed.confidence)
    found = (
        f"about {format_duration(speed.total_seconds)} at {format_count(speed.tokens_per_second)} tokens/s "
        f"({speed.confidence})"
    )
    return _report.ok("time", found)
