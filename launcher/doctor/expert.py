"""An expert's plan against what this machine has: workers, memory, rows, weights, room for checkpoints, time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.bases import TINY_BASE_NAME, find_config, hub_cache
from launcher.corpus.disks import probe_storage
from launcher.doctor.asking import NoAnswerError, in_time
from launcher.doctor.findings import Finding, Status
from launcher.doctor.host import SHM_FOLDER
from launcher.errors import LauncherError
from launcher.inputs import PlannedRun, base_folders
from launcher.plan.model import Plan
from launcher.rows import SAMPLE_TRAIN, probe_rows
from launcher.units import MIB, format_count, format_duration, format_gib

_SECONDS = 3.0
_COUNTED_BYTES = 256 * MIB  # of rows: beyond it their number is estimated from the file's size
_CHUNK_BYTES = 4 * MIB
_FEW, _MANY = 0.9, 1.1  # rows against what the manifest states
_ESTIMATE_SLACK = 0.15
_STATE_BYTES = 12  # FP32 weights and two states of each trained parameter
_SAVED_BYTES = 2  # a published base stores 16 bits a weight
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_BATCH_BYTES_PER_TOKEN = 48  # tokens, positions, targets and masks, in 64 bits each
_THIN = 0.03  # of the card, left over beside the headroom

WeightsState = Literal["here", "to download", "no weights", "drawn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    file: str | None  # where rows were found, or a store of prepared ones; None: they are fetched from the hub
    num_rows: int | None
    is_counted: bool
    stated: int | None  # by the manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFacts:
    plan: Plan
    rows: RowFacts
    weights: WeightsState
    weights_at: str
    weights_free_bytes: int | None  # where they would be downloaded to
    runs_free_bytes: int | None
    shm_free_bytes: int | None  # None: there is no shared memory
    is_offline: bool  # the hub may not be asked


def probe_expert(planned: PlannedRun, runs_dir: Path, environ: Mapping[str, str] = os.environ) -> ExpertFacts:
    plan = planned.plan
    state, place = _find_weights(plan, base_folders(planned.loaded.folder))
    return ExpertFacts(
        plan=plan,
        rows=_count_rows(planned),
        weights=state,
        weights_at=place,
        weights_free_bytes=_find_room(hub_cache()),
        runs_free_bytes=_find_room(runs_dir),
        shm_free_bytes=_find_room(SHM_FOLDER),
        is_offline=environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"),
    )


def _find_room(folder: Path) -> int | None:
    try:
        return in_time(lambda: probe_storage(folder).free_bytes, _SECONDS)
    except (OSError, NoAnswerError):
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
    if file is None or not file.is_file() or file.suffix not in (".jsonl", ".csv"):
        if is_smoke and name == SAMPLE_TRAIN:
            return RowFacts(file=str(file), num_rows=0, is_counted=True, stated=None)
        return _count_prepared(planned.plan, stated)
    if file.stat().st_size > _COUNTED_BYTES:
        estimate = probe_rows(dataset, folder)
        return RowFacts(file=str(file), num_rows=estimate.num_rows, is_counted=False, stated=stated)
    rows = _count_lines(file) - (1 if file.suffix == ".csv" else 0)
    return RowFacts(file=str(file), num_rows=max(0, rows), is_counted=True, stated=stated)


def _count_prepared(plan: Plan, stated: int | None) -> RowFacts:
    """Rows of the hub are counted once they were prepared here: by the newest store of them."""
    nothing = RowFacts(file=None, num_rows=None, is_counted=False, stated=stated)
    try:
        from launcher.corpus.preparation import data_root
        from launcher.corpus.store import Store, load_store_manifest

        name = (plan.data.path or "").partition("::")[0]
        root = data_root(plan)
        folders = sorted(root.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in folders:
            manifest = load_store_manifest(folder)
            if manifest is not None and manifest.parts.get("data (train)", "").startswith(f"hub:{name}:"):
                rows = Store(folder, manifest).audit.splits["train"].num_rows
                return RowFacts(file=str(folder), num_rows=rows, is_counted=True, stated=stated)
    except (ImportError, OSError, LauncherError, ValueError, KeyError):
        return nothing
    return nothing


def _count_lines(file: Path) -> int:
    count, last = 0, b"\n"
    with file.open("rb") as lines:
        while chunk := lines.read(_CHUNK_BYTES):
            count, last = count + chunk.count(b"\n"), chunk[-1:]
    return count + (last != b"\n")


def judge_expert(facts: ExpertFacts) -> Iterator[Finding]:
    yield _judge_workers(facts.plan)
    yield from _judge_shared_memory(facts)
    yield _judge_memory(facts.plan)
    yield _judge_rows(facts.rows)
    yield _judge_weights(facts)
    yield _judge_checkpoints(facts)
    yield from _judge_host_memory(facts.plan)
    yield _judge_time(facts.plan)


def _tell(subject: str, status: Status, found: str, matters: str = "", next_step: str = "") -> Finding:
    return Finding(family="expert", subject=subject, status=status, found=found, matters=matters, next_step=next_step)


def _judge_workers(plan: Plan) -> Finding:
    ranks = max(1, plan.hardware.gpus_per_node)
    cores, workers = plan.hardware.cpu_cores_per_node, plan.loader.num_workers * ranks
    plural = "" if plan.loader.num_workers == 1 else "s"
    each = f"{plan.loader.num_workers} loader worker{plural}" + (f" for each of {ranks} ranks" if ranks > 1 else "")
    found = f"{each}, {cores} cores"
    if workers + ranks <= cores or not workers:
        return _tell("workers", "ok", found)
    fits = max(0, cores // ranks - 1)
    return _tell(
        "workers",
        "problem",
        f"{found}: {workers + ranks} processes want to run at once",
        "workers take the time of the process that drives the GPU",
        f"--set training.config.dataloader_num_workers={fits}, or more cores",
    )


def _judge_shared_memory(facts: ExpertFacts) -> Iterator[Finding]:
    """Batches that workers have made and nobody has taken yet, of all ranks of this machine."""
    loader, batch = facts.plan.loader, facts.plan.batch
    ahead = loader.num_workers * (1 + (loader.prefetch_factor or 0)) * max(1, facts.plan.hardware.gpus_per_node)
    need = ahead * batch.micro_batch_size * batch.sequence_length * _BATCH_BYTES_PER_TOKEN
    if facts.shm_free_bytes is not None and need > facts.shm_free_bytes:
        yield _tell(
            "shared memory",
            "problem",
            f"{ahead} batches wait there, {format_gib(need)}; {format_gib(facts.shm_free_bytes)} are free",
            "a worker dies with a bus error where it is full",
            "docker run --shm-size=8g, or --set training.config.dataloader_num_workers=0",
        )


def _judge_memory(plan: Plan) -> Finding:
    memory = plan.memory
    what = "GPU memory" if plan.hardware.gpu is not None else "memory"
    found = (
        f"{format_gib(memory.total_bytes)} of {format_gib(memory.free_bytes)} free {what} predicted, "
        f"{format_gib(memory.margin_bytes)} spare beside {format_gib(memory.headroom_bytes)} headroom"
    )
    held = memory.card_bytes - memory.free_bytes
    if plan.hardware.gpu is not None and held > 0.1 * memory.card_bytes:
        why = f"others hold {format_gib(held)}: on a free card the plan would be larger, and faster"
        return _tell(what, "note", found, why, "the GPU's part of this report names them")
    if memory.margin_bytes < _THIN * memory.card_bytes and plan.ladder:
        rung = plan.ladder[0]
        return _tell(what, "ok", f"{found}; if it is too little: {rung.action}, {format_gib(rung.predicted_bytes)}")
    return _tell(what, "ok", found)


def _judge_rows(rows: RowFacts) -> Finding:
    if rows.file is None:
        stated = "" if rows.stated is None else f"; the manifest states {rows.stated:,} rows"
        return _tell("rows", "ok", f"not on this disk, they are fetched from where the manifest says{stated}")
    about = "" if rows.is_counted else "about "
    found = f"{about}{rows.num_rows or 0:,} in {rows.file}"
    if not rows.num_rows:
        return _tell("rows", "problem", found, "there is nothing to train on", "fetch or make the file again")
    if rows.stated is None:
        return _tell("rows", "ok", found)
    found += f", the manifest states {rows.stated:,}"
    slack = 0.0 if rows.is_counted else _ESTIMATE_SLACK
    ratio = rows.num_rows / rows.stated
    if ratio < _FEW - slack:
        why = "the file may have been cut short; steps, time and the schedule of the learning rate depend on it"
        return _tell("rows", "problem", found, why, "fetch the file again, or set training.dataset.splits.train right")
    if ratio > _MANY + slack:
        return _tell("rows", "note", found, "time and cost were stated for fewer", "set training.dataset.splits.train")
    return _tell("rows", "ok", found)


def _judge_weights(facts: ExpertFacts) -> Finding:
    plan = facts.plan
    if facts.weights == "drawn":
        return _tell("base", "ok", f"{facts.weights_at}: drawn from a seed, nothing is loaded")
    if facts.weights == "here":
        return _tell("base", "ok", f"{plan.base.name} in {facts.weights_at}")
    if facts.weights == "no weights":
        return _tell(
            "base",
            "problem",
            f"{facts.weights_at} has a config.json, but no weights (*.safetensors)",
            "the run would end when it loads them",
            "download them there; --random-weights measures speed and memory without",
        )
    size = plan.base.num_parameters * _SAVED_BYTES
    found = f"{plan.base.name} is not on this disk: {format_gib(size)} to download"
    if facts.is_offline:
        return _tell(
            "base",
            "problem",
            f"{found}, and HF_HUB_OFFLINE forbids it",
            "the run would end when it loads them",
            "unset HF_HUB_OFFLINE once, or set LAUNCHER_MODELS_DIR to a folder that holds it",
        )
    room = facts.weights_free_bytes
    if room is not None and room < 1.1 * size:
        why = "the download would fill the disk of the Hugging Face cache"
        return _tell(
            "base", "problem", f"{found}, {format_gib(room)} are free", why, "export HF_HOME=DIR on another disk"
        )
    return _tell("base", "ok", found)


def _judge_checkpoints(facts: ExpertFacts) -> Finding:
    plan = facts.plan
    one = plan.adapter.trainable_parameters * _STATE_BYTES
    kept = 1 + (plan.schedule.save_total_limit or 3)  # the new one is whole before an old one goes
    need = kept * one + plan.adapter.trainable_parameters * 4
    found = f"{format_gib(one)} each, {format_gib(need)} for {kept} and what is trained"
    if facts.runs_free_bytes is None:
        return _tell("checkpoints", "ok", found)
    found += f"; {format_gib(facts.runs_free_bytes)} free"
    if facts.runs_free_bytes < need:
        return _tell(
            "checkpoints",
            "problem",
            found,
            "a checkpoint that cannot be written ends the run",
            "--runs-dir names a folder on another disk, or --set training.config.save_total_limit=1",
        )
    return _tell("checkpoints", "ok", found)


def _judge_host_memory(plan: Plan) -> Iterator[Finding]:
    ranks = max(1, plan.hardware.gpus_per_node)
    have = plan.hardware.ram_gib_per_node * 1024 * MIB
    saving = plan.adapter.trainable_parameters * _STATE_BYTES
    need = plan.memory.host_bytes * ranks + saving
    found = f"{format_gib(need)} of {format_gib(have)}"
    if need > have:
        yield _tell(
            "CPU memory",
            "problem",
            found,
            "the first rank gathers weights and states there to save them"
            + (", beside what is offloaded" if plan.memory.host_bytes else "")
            + ": the kernel would kill it",
            "a machine with more CPU memory, or an adapter (lora) instead of full fine-tuning",
        )
    elif need > 0.5 * have:
        yield _tell("CPU memory", "note", found, "saving takes more than half of what can be had")


def _judge_time(plan: Plan) -> Finding:
    speed = plan.speed
    if speed.total_seconds is None or speed.tokens_per_second is None:
        return _tell("time", "ok", speed.confidence)
    found = (
        f"about {format_duration(speed.total_seconds)} at {format_count(speed.tokens_per_second)} tokens/s "
        f"({speed.confidence})"
    )
    return _tell("time", "ok", found)
