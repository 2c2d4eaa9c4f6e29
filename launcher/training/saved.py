"""What was trained, as files: an adapter in PEFT's format, or the whole model under full fine-tuning."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor

from launcher.errors import RunFailedError
from launcher.paths import write_text_atomically
from launcher.training.gathering import copy_buffers, gather_trained
from launcher.training.loading import DTYPES
from launcher.training.run import Run


def save_trained(run: Run, folder: Path) -> None:
    """Safetensors. Written beside, then renamed: a folder that exists is whole. Every rank must call it."""
    state = gather_trained(run.engine)
    if not run.engine.is_main:
        return
    scratch = folder.with_name(f".{folder.name}.making")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.mkdir(parents=True)
        _write(run, scratch, state)
        let_others_read(scratch)
        scratch.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)  # half of it may be what fills the disk
        raise RunFailedError(f"{folder} cannot be written: {error}", hint="is the disk full, or read-only?") from None


def let_others_read(folder: Path) -> None:
    """safetensors writes files that only their owner may read; these are made to be passed on."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)


def _write(run: Run, folder: Path, state: dict[str, Tensor]) -> None:
    model = run.engine.module.model
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder), state_dict=state)
        _name_base(folder / "adapter_config.json", run)
    else:
        dtype = DTYPES[run.plan.precision.compute_dtype]
        model.save_pretrained(
            str(folder),
            state_dict={name: tensor.to(dtype) for name, tensor in state.items()} | copy_buffers(run.engine),
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
