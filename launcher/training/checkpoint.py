"""A checkpoint: all that the rest of a training depends on, taken from a live run, written, and put into another."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from launcher import __version__
from launcher.checkpoints import (
    MANIFEST_FILE,
    BestState,
    Checkpoint,
    CheckpointManifest,
    Damaged,
    hash_file,
    read_checkpoint,
)
from launcher.errors import RunFailedError
from launcher.paths import sync_folder, write_text_atomically
from launcher.plan.learning import learning_values
from launcher.training.engine import Engine
from launcher.training.handing import Handed, hand_out
from launcher.training.position import Position
from launcher.training.run import Run
from launcher.training.saved import own_names, weights_file, write_exactly, write_folder
from launcher.training.states import gather_optimizer, gather_weights, place_optimizer, place_weights

OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """On the host of the first rank: the training goes on while it is written."""

    manifest: CheckpointManifest  # without the files' hashes
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: dict[str, Tensor]


def take_snapshot(run: Run, position: Position, best: BestState) -> Snapshot | None:
    """Every rank must call it; only the first gets one."""
    engine = run.engine
    weights, optimizer = gather_weights(engine), gather_optimizer(engine)
    random = _gather_random(engine)
    if not engine.is_main:
        return None
    manifest = CheckpointManifest(
        step=position.step,
        num_steps=run.num_steps,
        chain=position.chain,
        data_key=run.data_key,
        base=run.base_fingerprint,
        learning=learning_values(run.plan),
        schedule_steps=int(engine.schedule.last_epoch),
        scaler=_read_scaler(engine),
        best=best,
        owes_evaluation=position.owes_evaluation,
        strategy=run.plan.strategy,
        num_ranks=engine.num_ranks,
        launcher_version=__version__,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files={},
    )
    named = {f"{key}/{name}": tensor for (key, name), tensor in optimizer.items()}
    return Snapshot(manifest=manifest, weights=weights, optimizer=named, random=random)


def write_snapshot(run: Run, snapshot: Snapshot) -> Path:
    """Then read again, from the first byte to the last: only what is proven may push out an older one."""
    folder = run.paths.checkpoint(snapshot.manifest.step)
    write_folder(folder, lambda scratch: _write(run, snapshot, scratch))
    proven = read_checkpoint(folder)
    if isinstance(proven, Damaged):
        raise RunFailedError(f"{folder} was written, and reads otherwise: {proven.reason}", hint="is the disk broken?")
    return folder


def _write(run: Run, snapshot: Snapshot, folder: Path) -> None:
    write_exactly(run, folder, snapshot.weights)
    save_file(snapshot.optimizer, folder / OPTIMIZER_FILE)
    save_file(snapshot.random, folder / RANDOM_FILE)
    sync_folder(folder)
    files = {file.name: hash_file(file) for file in sorted(folder.iterdir())}
    manifest = snapshot.manifest.model_copy(update={"files": files})
    write_text_atomically(folder / MANIFEST_FILE, manifest.model_dump_json(indent=2) + "\n")


def restore(run: Run, checkpoint: Checkpoint | None) -> None:
    """Every rank must call it; the first has the checkpoint."""
    engine = run.engine
    manifest = hand_out(engine.accelerator, None if checkpoint is None else checkpoint.manifest)
    folder = hand_out(engine.accelerator, None if checkpoint is None else checkpoint.folder)
    assert manifest is not None
    assert folder is not None
    names = own_names(run)
    weights = Handed(engine, weights_file(run, folder))
    place_weights(engine, ((names[entry.name], tensor) for entry, tensor in weights))
    engine.module.products.refresh(anyway=True)
    states = Handed(engine, folder / OPTIMIZER_FILE)
    kept = sorted({entry.name.partition("/")[0] for entry in states.entries if entry.shape})
    place_optimizer(engine, ((_split(entry.name), tensor) for entry, tensor in states), kept)
    _set_schedule(engine, manifest.schedule_steps)
    _set_scaler(engine, manifest.scaler)
    _set_random(engine, {entry.name: tensor for entry, tensor in Handed(engine, folder / RANDOM_FILE)})


def _split(name: str) -> tuple[str, str]:
    key, _, parameter = name.partition("/")
    return key, parameter


def _set_schedule(engine: Engine, steps: int) -> None:
    """Step by step, as it came there: no schedule keeps anything else."""
    schedule: Any = engine.schedule
    schedule._step_count = 2  # torch would warn that no optimizer step came first
    schedule.optimizer._opt_called = True
    while schedule.last_epoch < steps:
        schedule.step()


def _gather_random(engine: Engine) -> dict[str, Tensor]:
    """One row a rank."""
    states = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(engine.device)
    gathered = {name: engine.accelerator.gather(state[None].to(engine.device)) for name, state in states.items()}
    return {name: rows.cpu() for name, rows in gathered.items()}


def _set_random(engine: Engine, states: dict[str, Tensor]) -> None:
    """Where there are more ranks than there were, the others take the first one's: all were seeded alike."""
    # Cloned: torch 2.13 crashes on a state that is a part of another tensor.
    mine = {name: rows[engine.rank if engine.rank < len(rows) else 0].cpu().clone() for name, rows in states.items()}
    torch.set_rng_state(mine["cpu"])
    if engine.device.type == "cuda" and "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"], engine.device)


def _read_scaler(engine: Engine) -> dict[str, float]:
    """Of FP16's loss scaling; nothing elsewhere."""
    if engine.is_deepspeed:
        scaler: Any = getattr(vars(engine.optimizer)["optimizer"], "loss_scaler", None)
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: float(getattr(scaler, name)) for name in names if hasattr(scaler, name)}
    if engine.accelerator.scaler is None:
        return {}
    state = engine.accelerator.scaler.state_dict()
    return {name: float(value) for name, value in state.items()}


def _set_scaler(engine: Engine, values: dict[str, float]) -> None:
    if not values:
        return
    if engine.is_deepspeed:
        scaler: Any = getattr(vars(engine.optimizer)["optimizer"], "loss_scaler", None)
        for name, value in values.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value if name == "cur_scale" else int(value))
    elif engine.accelerator.scaler is not None and "scale" in values:
        whole = {"growth_interval", "_growth_tracker"}
        engine.accelerator.scaler.load_state_dict(
            {name: int(value) if name in whole else value for name, value in values.items()}
        )
