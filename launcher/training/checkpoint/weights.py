"""Write and read trained weights: an adapter in PEFT's format, or the complete model after full fine-tuning."""

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

from launcher.core.errors import InputError, RunFailedError
from launcher.core.run_paths import sync_folder, write_text_atomically
from launcher.training.checkpoint.state_dict import gather_weights
from launcher.training.engine.run import TrainingRun
from launcher.training.model.base_model import DTYPES

ADAPTER_FILE = "adapter_model.safetensors"
WEIGHTS_FILE = "weights.safetensors"  # of a checkpoint with full fine-tuning: FP32, by parameter name


def save_weights(run: TrainingRun, folder: Path) -> None:
    """Save the current weights for inference. Every rank must call it."""
    weights = gather_weights(run.engine)
    if run.engine.is_main:
        write_weights(run, weights, folder)


def write_weights(run: TrainingRun, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write gathered weights for inference; a complete model in its compute dtype."""
    write_folder(folder, lambda scratch: _write(run, scratch, weights))


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under a temporary name, sync it and rename it, so that an existing folder is always complete."""
    scratch = folder.with_name(f".{folder.name}.making")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        write(scratch)
        make_readable(scratch)
        sync_folder(scratch)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError, InputError) as error:
        shutil.rmtree(scratch, ignore_errors=True)  # it may be what fills the disk
        reason = error.title if isinstance(error, InputError) else error
        raise RunFailedError(f"{folder} cannot be written: {reason}", hint="is the disk full, or read-only?") from None


def make_readable(folder: Path) -> None:
    """Apply the umask to files that safetensors made readable by their owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)


def write_exact_weights(run: TrainingRun, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights for a checkpoint, without loss of precision. Adapters are in PEFT's format."""
    if isinstance(run.engine.module.model, PeftModel):
        _write(run, folder, weights)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty template
    else:
        save_file(dict(weights), folder / WEIGHTS_FILE)


def weights_file(run: TrainingRun, folder: Path) -> Path:
    """Return the path of a checkpoint's weights."""
    return folder / (ADAPTER_FILE if isinstance(run.engine.module.model, PeftModel) else WEIGHTS_FILE)


def read_exact_weights(run: TrainingRun, folder: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint, by parameter name."""
    names = map_saved_names(run)
    return {names[name]: tensor for name, tensor in load_file(weights_file(run, folder)).items()}


def map_saved_names(run: TrainingRun) -> dict[str, str]:
    """Return a mapping from names in a checkpoint file to parameter names, which PEFT shortens."""
    model = run.engine.module.model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not isinstance(model, PeftModel):
        return {name: name for name in trained}
    markers = {name: empty(0) for name in trained}
    names_by_id = {id(marker): name for name, marker in markers.items()}
    saved = get_peft_model_state_dict(model, state_dict=markers)
    return {saved_name: names_by_id[id(marker)] for saved_name, marker in saved.items()}


def _write(run: TrainingRun, folder: Path, weights: Mapping[str, Tensor]) -> None:
    model = run.engine.module.model
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder), state_dict=dict(weights))
        _fix_adapter_config(folder / "adapter_config.json", run)
        return
    dtype = DTYPES[run.plan.precision.compute_dtype]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    rest = {  # buffers, and a frozen vision tower
        name: tensor.to("cpu", dtype if name in parameters else tensor.dtype)
        for name, tensor in model.state_dict().items()
        if name not in trained
    }
    model.save_pretrained(str(folder), state_dict={name: tensor.to(dtype) for name, tensor in weights.items()} | rest)
    # The config names the training dtype, but loaders use it for the saved weights.
    _update_json(folder / "config.json", {"dtype": str(dtype).removeprefix("torch.")})


def _fix_adapter_config(config: Path, run: TrainingRun) -> None:
    """Replace the base's local path by its name, and sort sets, which PEFT writes in any order."""
    changes: dict[str, object] = {"base_model_name_or_path": run.plan.base.name, "revision": run.plan.base_revision}
    values = json.loads(config.read_text(encoding="utf-8"))
    for name in ("target_modules", "feedforward_modules"):
        if isinstance(values.get(name), list):
            changes[name] = sorted(values[name])
    _update_json(config, changes)


def _update_json(file: Path, changes: dict[str, object]) -> None:
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    write_text_atomically(file, json.dumps(values, indent=2, sort_keys=True) + "\n")
