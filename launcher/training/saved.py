"""What was trained, as files: an adapter in PEFT's format, or the whole model under full fine-tuning."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, empty

from launcher.errors import InputError, RunFailedError
from launcher.paths import sync_folder, write_text_atomically
from launcher.training.gathering import copy_buffers
from launcher.training.loading import DTYPES
from launcher.training.run import Run
from launcher.training.states import gather_weights

ADAPTER_FILE = "adapter_model.safetensors"
WEIGHTS_FILE = "weights.safetensors"  # of a checkpoint under full fine-tuning: FP32, by the parameters' own names


def save_trained(run: Run, folder: Path) -> None:
    """What is trained now. Every rank must call it."""
    weights = gather_weights(run.engine)
    if run.engine.is_main:
        write_trained(run, weights, folder)


def write_trained(run: Run, weights: Mapping[str, Tensor], folder: Path) -> None:
    """For use: a whole model in the dtype it computes in."""
    write_folder(folder, lambda scratch: _write(run, scratch, weights))


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Written beside, synced, then renamed: a folder that exists is whole."""
    scratch = folder.with_name(f".{folder.name}.making")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        write(scratch)
        let_others_read(scratch)
        sync_folder(scratch)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError, InputError) as error:
        shutil.rmtree(scratch, ignore_errors=True)  # half of it may be what fills the disk
        why = error.title if isinstance(error, InputError) else error
        raise RunFailedError(f"{folder} cannot be written: {why}", hint="is the disk full, or read-only?") from None


def let_others_read(folder: Path) -> None:
    """safetensors writes files that only their owner may read; these are made to be passed on."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)


def write_exactly(run: Run, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """To go on from, not a bit lost. An adapter is in its format for use at the same time."""
    if isinstance(run.engine.module.model, PeftModel):
        _write(run, folder, weights)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's form, to be filled in
    else:
        save_file(dict(weights), folder / WEIGHTS_FILE)


def weights_file(run: Run, folder: Path) -> Path:
    return folder / (ADAPTER_FILE if isinstance(run.engine.module.model, PeftModel) else WEIGHTS_FILE)


def read_exactly(run: Run, folder: Path) -> dict[str, Tensor]:
    """What write_exactly wrote, by the parameters' own names."""
    names = own_names(run)
    return {names[name]: tensor for name, tensor in load_file(weights_file(run, folder)).items()}


def own_names(run: Run) -> dict[str, str]:
    """Name in a checkpoint's file -> name of the parameter: PEFT leaves some words out."""
    model = run.engine.module.model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not isinstance(model, PeftModel):
        return {name: name for name in trained}
    marks = {name: empty(0) for name in trained}
    owners = {id(mark): name for name, mark in marks.items()}
    return {saved: owners[id(mark)] for saved, mark in get_peft_model_state_dict(model, state_dict=marks).items()}


def _write(run: Run, folder: Path, weights: Mapping[str, Tensor]) -> None:
    model = run.engine.module.model
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder), state_dict=dict(weights))
        _name_base(folder / "adapter_config.json", run)
    else:
        dtype = DTYPES[run.plan.precision.compute_dtype]
        model.save_pretrained(
            str(folder),
            state_dict={name: tensor.to(dtype) for name, tensor in weights.items()} | copy_buffers(run.engine),
        )
        # It tells the dtype that was trained in; loaders go by it.
        _change_json(folder / "config.json", {"dtype": str(dtype).removeprefix("torch.")})


def _name_base(config: Path, run: Run) -> None:
    """PEFT writes where the base lay on this machine; its name means something elsewhere. Sets come in any order."""
    changes: dict[str, object] = {"base_model_name_or_path": run.plan.base.name, "revision": run.plan.base_revision}
    values = json.loads(config.read_text(encoding="utf-8"))
    for name in ("target_modules", "feedforward_modules"):
        if isinstance(values.get(name), list):
            changes[name] = sorted(values[name])
    _change_json(config, changes)


def _change_json(file: Path, changes: dict[str, object]) -> None:
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    write_text_atomically(file, json.dumps(values, indent=2, sort_keys=True) + "\n")
