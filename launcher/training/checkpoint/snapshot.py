"""Take, write and restore checkpoints: everything that the remaining steps of a training depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from launcher import __version__
from launcher.core.errors import RunFailedError, first_line
from launcher.core.processes import is_lost_rank
from launcher.core.run_paths import sync_folder, write_text_atomically
from launcher.plan.resume_identity import collect_learning_settings
from launcher.runs.checkpoints import (
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    RANDOM_FILE,
    BestState,
    Checkpoint,
    CheckpointManifest,
    Damaged,
    find_damage,
    hash_file,
    read_checkpoint,
)
from launcher.training.checkpoint.progress import TrainProgress
from launcher.training.checkpoint.shards import (
    OPTIMIZER,
    BroadcastTensors,
    TensorFile,
    TensorShards,
    list_own,
    run_together,
    save_shards,
)
from launcher.training.checkpoint.state_dict import gather_optimizer, gather_weights, load_optimizer, load_weights
from launcher.training.checkpoint.weights import map_saved_names, open_weights, write_exact_weights, write_folder
from launcher.training.engine.collectives import seed_rank
from launcher.training.engine.engine import Engine
from launcher.training.engine.run import TrainingRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Host copy of a checkpoint on rank 0, written while the training continues."""

    manifest: CheckpointManifest  # without the hashes of its files
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng_states: dict[str, Tensor]


def take_snapshot(run: TrainingRun, progress: TrainProgress, best: BestState) -> Snapshot | None:
    """Return a copy of the training state in host memory on rank 0, None on other ranks. Every rank must call it."""
    engine = run.engine
    weights, optimizer = gather_weights(engine), gather_optimizer(engine)
    rng_states = _gather_rng_states(engine)
    if not engine.is_main:
        return None
    named = {f"{key}/{name}": tensor for (key, name), tensor in optimizer.items()}
    manifest = _make_manifest(run, progress, best)
    return Snapshot(manifest=manifest, weights=weights, optimizer=named, rng_states=rng_states)


def _make_manifest(run: TrainingRun, progress: TrainProgress, best: BestState) -> CheckpointManifest:
    engine = run.engine
    return CheckpointManifest(
        step=progress.step,
        num_steps=run.num_steps,
        chain=progress.chain,
        data_key=run.data_key,
        base=run.base_fingerprint,
        learning=collect_learning_settings(run.plan),
        schedule_steps=int(engine.lr_scheduler.last_epoch),
        scaler=_get_loss_scale(engine),
        best=best,
        owes_evaluation=progress.owes_evaluation,
        strategy=run.plan.strategy,
        num_ranks=engine.num_ranks,
        sharded=run.plan.shards_checkpoints,
        launcher_version=__version__,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )


def write_snapshot(run: TrainingRun, snapshot: Snapshot) -> Path:
    """Write a checkpoint and verify it by reading it back; only then may an older one be deleted."""
    folder = run.paths.checkpoint(snapshot.manifest.step)
    write_folder(folder, lambda scratch: _write(run, snapshot, scratch))
    verified = read_checkpoint(folder)
    if isinstance(verified, Damaged):
        raise RunFailedError(f"{folder}: verification after writing failed: {verified.reason}", hint="check the disk")
    return folder


def _write(run: TrainingRun, snapshot: Snapshot, folder: Path) -> None:
    write_exact_weights(run, folder, snapshot.weights)
    save_file(snapshot.optimizer, folder / OPTIMIZER_FILE)
    save_file(snapshot.rng_states, folder / RANDOM_FILE)
    sync_folder(folder)
    files = {file.name: hash_file(file) for file in sorted(folder.iterdir())}
    _write_manifest(folder, snapshot.manifest.model_copy(update={"files": files}))


def _write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    write_text_atomically(folder / MANIFEST_FILE, manifest.model_dump_json(indent=2) + "\n", redacts=False)


def write_sharded(run: TrainingRun, progress: TrainProgress, best: BestState) -> None:
    """Write a checkpoint in shards and verify it. Every rank must call it; all wait until the checkpoint is on disk.

    A rank's error is raised by all of them.
    """
    engine, folder = run.engine, run.paths.checkpoint(progress.step)
    manifest, rng_states = _make_manifest(run, progress, best), _gather_rng_states(engine)

    def on_main(work: Callable[[], None]) -> None:
        run_together(engine, lambda: work() if engine.is_main else None)

    def write(scratch: Path) -> None:
        nonlocal manifest
        run_together(engine, lambda: save_shards(engine, scratch))
        on_main(lambda: save_file(rng_states, scratch / RANDOM_FILE))
        own = [*list_own(engine, scratch), *([scratch / RANDOM_FILE] if engine.is_main else [])]
        hashes = run_together(engine, lambda: {file.name: hash_file(file) for file in own})
        files = {name: by_name[name] for by_name in hashes for name in by_name}
        manifest = manifest.model_copy(update={"files": files})
        on_main(lambda: _write_manifest(scratch, manifest))

    write_folder(folder, write, on_main)
    own = {file.name for file in list_own(engine, folder)}
    for damage in run_together(engine, lambda: find_damage(folder, manifest, own)):
        if damage is not None:
            raise RunFailedError(f"{folder}: verification after writing failed: {damage}", hint="check the disk")


def restore(run: TrainingRun, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into the run. Every rank must call it, but only rank 0 needs to see the files."""
    try:
        _restore(run, checkpoint.manifest, checkpoint.folder)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OSError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError) or is_lost_rank(error):
            raise
        raise RunFailedError(
            f"{checkpoint.folder} does not fit this training: {first_line(error)}",
            hint="it belongs to another training or is damaged: delete it to resume from the checkpoint before it",
        ) from error


def _restore(run: TrainingRun, manifest: CheckpointManifest, folder: Path) -> None:
    engine, names = run.engine, map_saved_names(run)
    weights = BroadcastTensors(engine, open_weights(run, folder, sharded=manifest.sharded))
    load_weights(engine, ((names[entry.name], tensor) for entry, tensor in weights))
    engine.module.fused_lora.refresh(force=True)
    source = TensorShards(folder, OPTIMIZER) if manifest.sharded else TensorFile(folder / OPTIMIZER_FILE)
    states = BroadcastTensors(engine, source)
    keys = sorted({entry.name.partition("/")[0] for entry in states.entries if entry.shape})
    load_optimizer(engine, ((_split_name(entry.name), tensor) for entry, tensor in states), keys)
    _set_lr_scheduler(engine, manifest.schedule_steps)
    _set_loss_scale(engine, manifest.scaler)
    states = BroadcastTensors(engine, TensorFile(folder / RANDOM_FILE))
    _set_rng_states(run, manifest.step, {entry.name: tensor for entry, tensor in states})


def _split_name(name: str) -> tuple[str, str]:
    key, _, parameter = name.partition("/")
    return key, parameter


def _set_lr_scheduler(engine: Engine, steps: int) -> None:
    """Restore the LR scheduler by advancing it by `steps` steps; it has no other state."""
    lr_scheduler: Any = engine.lr_scheduler
    lr_scheduler._step_count = 2  # else torch warns that the optimizer has not stepped yet
    lr_scheduler.optimizer._opt_called = True
    while lr_scheduler.last_epoch < steps:
        lr_scheduler.step()


def _gather_rng_states(engine: Engine) -> dict[str, Tensor]:
    """Return the RNG states, one row per rank."""
    states = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(engine.device)
    gathered = {name: engine.accelerator.gather(state[None].to(engine.device)) for name, state in states.items()}
    return {name: rows.cpu() for name, rows in gathered.items()}


def _set_rng_states(run: TrainingRun, step: int, states: dict[str, Tensor]) -> None:
    """Set this rank's RNG states; a rank that did not exist before is seeded by its number and the step."""
    engine = run.engine
    if engine.rank >= len(states["cpu"]):
        seed_rank(run.plan.schedule.seed, engine.rank, step)
        return
    # Cloned: torch 2.13 crashes on a state that is a view of another tensor.
    own = {name: rows[engine.rank].cpu().clone() for name, rows in states.items()}
    torch.set_rng_state(own["cpu"])
    if engine.device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], engine.device)


def _get_loss_scale(engine: Engine) -> dict[str, float]:
    """Return the state of FP16 loss scaling; empty without it."""
    if engine.is_deepspeed:
        scaler: Any = getattr(vars(engine.optimizer)["optimizer"], "loss_scaler", None)
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: float(getattr(scaler, name)) for name in names if hasattr(scaler, name)}
    if engine.accelerator.scaler is None:
        return {}
    state = engine.accelerator.scaler.state_dict()
    return {name: float(value) for name, value in state.items()}


def _set_loss_scale(engine: Engine, values: dict[str, float]) -> None:
    if not values:
        return
    if engine.is_deepspeed:
        scaler: Any = getattr(vars(engine.optimizer)["optimizer"], "loss_scaler", None)
        for name, value in values.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value if name == "cur_scale" else int(value))
    elif engine.accelerator.scaler is not None and "scale" in values:
        integers = {"growth_interval", "_growth_tracker"}
        engine.accelerator.scaler.load_state_dict(
            {name: int(value) if name in integers else value for name, value in values.items()}
        )
