"""Write and read trained weights: an adapter in PEFT's format, or the complete model after full fine-tuning."""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, empty, tensor

from launcher.core.errors import InputError, RunFailedError, hint_for
from launcher.core.run_paths import sync_folder, write_text_atomically
from launcher.training.checkpoint.shards import WEIGHTS, ShardWriter, TensorFile, TensorShards, TensorSource, write_all
from launcher.training.checkpoint.state_dict import gather_weights, iterate_weights
from launcher.training.engine.run import TrainingRun
from launcher.training.model.base_model import DTYPES
from launcher.training.model.pissa import convert_config, get_initial_lora, subtract_initial

ADAPTER_FILE = "adapter_model.safetensors"
WEIGHTS_FILE = "weights.safetensors"  # of a checkpoint with full fine-tuning: FP32, by parameter name


def save_weights(run: TrainingRun, folder: Path) -> None:
    """Save the current weights for inference. Every rank must call it."""
    if run.plan.shards_checkpoints:
        write_weights(run, iterate_weights(run.engine), folder)
    else:
        weights = gather_weights(run.engine)
        if run.engine.is_main:
            write_weights(run, weights.items(), folder)


def write_weights(run: TrainingRun, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write weights for inference on rank 0: an adapter, or a complete model in the compute dtype.

    A sharded model is written while `weights` is iterated. If the iteration gathers them, every rank must call this.
    """
    if not run.engine.is_main:
        deque(weights, maxlen=0)
    elif run.plan.shards_checkpoints:
        write_folder(folder, lambda scratch: _write_model_shards(run, scratch, weights))
    else:
        write_folder(folder, lambda scratch: _write_for_inference(run, scratch, dict(weights)))


def _write_for_inference(run: TrainingRun, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights for inference; a PiSSA adapter is converted to an adapter of the published base."""
    initial = get_initial_lora(run.engine.module.model)
    _save_pretrained(run, folder, subtract_initial(weights, initial))
    if initial:
        config = folder / "adapter_config.json"
        _update_json(config, convert_config(json.loads(config.read_text(encoding="utf-8"))))


def write_folder(
    folder: Path, write: Callable[[Path], None], on_main: Callable[[Callable[[], None]], None] = lambda work: work()
) -> None:
    """Write a folder under a temporary name, sync it and rename it, so that an existing folder is always complete.

    If every rank calls it, `on_main` runs work on rank 0 only and raises its errors everywhere.
    """
    scratch = folder.with_name(f".{folder.name}.making")

    def prepare() -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)

    def publish() -> None:
        make_readable(scratch)
        sync_folder(scratch)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)

    try:
        on_main(prepare)
        write(scratch)
        on_main(publish)
    except (OSError, SafetensorError, InputError) as error:
        shutil.rmtree(scratch, ignore_errors=True)  # it may be what fills the disk
        reason = error.title if isinstance(error, InputError) else error
        raise RunFailedError(f"{folder} cannot be written: {reason}", hint=hint_for(error)) from None


def make_readable(folder: Path) -> None:
    """Apply the umask to files that safetensors made readable by their owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)


def write_exact_weights(run: TrainingRun, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights for a checkpoint, without loss of precision. Adapters are in PEFT's format."""
    if isinstance(run.engine.module.model, PeftModel):
        _save_pretrained(run, folder, weights)
    else:
        save_file(dict(weights), folder / WEIGHTS_FILE)


def open_weights(run: TrainingRun, folder: Path, *, sharded: bool) -> TensorSource:
    """Open the weights of a checkpoint."""
    if sharded:
        return TensorShards(folder, WEIGHTS)
    return TensorFile(folder / (ADAPTER_FILE if isinstance(run.engine.module.model, PeftModel) else WEIGHTS_FILE))


def read_exact_weights(run: TrainingRun, folder: Path, *, sharded: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Read the weights of a checkpoint one by one, by parameter name."""
    names, source = map_saved_names(run), open_weights(run, folder, sharded=sharded)
    for entry in source.entries():
        yield names[entry.name], source.read(entry)


def map_saved_names(run: TrainingRun) -> dict[str, str]:
    """Return the parameter name of each tensor name in a checkpoint, where PEFT saves shortened names."""
    model = run.engine.module.model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not isinstance(model, PeftModel):
        return {name: name for name in trained}
    markers = {name: empty(0) for name in trained}
    names_by_id = {id(marker): name for name, marker in markers.items()}
    saved = get_peft_model_state_dict(model, state_dict=_add_tied(model, markers), save_embedding_layers=False)
    return {saved_name: names_by_id[id(marker)] for saved_name, marker in saved.items()}


def _add_tied(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return trained weights under all names of tied parameters, such as embeddings and LM head: PEFT saves both."""
    by_parameter = {id(parameter): weights[name] for name, parameter in model.named_parameters() if name in weights}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: by_parameter[id(parameter)] for name, parameter in everything if id(parameter) in by_parameter}


def _save_pretrained(run: TrainingRun, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write an adapter as PEFT does, or a complete model as transformers does."""
    model = run.engine.module.model
    if isinstance(model, PeftModel):
        # PEFT would write an empty model card, and compile its template each time while the training waits for the GIL.
        vars(model)["create_or_update_model_card"] = lambda _folder: None
        model.save_pretrained(str(folder), state_dict=_add_tied(model, weights), save_embedding_layers=False)
        _fix_adapter_config(folder / "adapter_config.json", run)
        return
    dtype = DTYPES[run.plan.precision.compute_dtype]
    complete = {name: tensor.to(dtype) for name, tensor in weights.items()} | dict(_iterate_untrained(run, dtype))
    model.save_pretrained(str(folder), state_dict=complete)
    _set_dtype(folder, dtype)


def _write_model_shards(run: TrainingRun, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write a complete model as transformers does, but one shard at a time: it may not fit into host memory."""
    weights = iter(weights)
    dtype = DTYPES[run.plan.precision.compute_dtype]
    writer = ShardWriter(folder, "model")
    try:
        saved_names = _write_configs(run, folder)
        if not saved_names:
            run.warn("transformers merges or splits weights of this model when saving: rank 0 holds all in its memory")
            _save_pretrained(run, folder, {name: weight.to("cpu", dtype) for name, weight in weights})
            return
        cast = ((name, tensor.to(dtype)) for name, tensor in weights)
        rest = ((name, tensor) for name, tensor in _iterate_untrained(run, dtype) if name in saved_names)
        write_all(writer, ((saved_names[name], tensor) for name, tensor in chain(cast, rest)), is_main=True)
    finally:
        deque(weights, maxlen=0)  # the other ranks gather them all
    weight_map: dict[str, str] = {}
    for index, names in enumerate(writer.names):
        suffix = "" if len(writer.names) == 1 else f"-{index + 1:05d}-of-{len(writer.names):05d}"
        file = writer.path(index).rename(folder / f"model{suffix}.safetensors")
        weight_map |= dict.fromkeys(names, file.name)
    if len(writer.names) > 1:
        content = {"metadata": {"total_size": writer.num_bytes}, "weight_map": weight_map}
        write_text_atomically(folder / "model.safetensors.index.json", json.dumps(content, indent=2) + "\n")
    _set_dtype(folder, dtype)


def _write_configs(run: TrainingRun, folder: Path) -> dict[str, str]:
    """Write a model's config files; return the name under which transformers saves each weight.

    transformers may rename or omit weights; the names are those under which it saves one-element tensors in their
    place. Empty if it merges or splits weights.
    """
    model = run.engine.module.model
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    try:
        model.save_pretrained(str(folder), state_dict={name: tensor([index]) for index, name in enumerate(names)})
        file = folder / "model.safetensors"
        saved = {names[int(marker)]: name for name, marker in load_file(file).items()}
    except (RuntimeError, ValueError, LookupError, TypeError):
        return {}
    file.unlink()
    is_complete = all(name in saved for name, weight in model.named_parameters() if weight.requires_grad)
    return saved if is_complete else {}


def _iterate_untrained(run: TrainingRun, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield what a complete model has in addition to trained weights: buffers, and a frozen vision tower."""
    model = run.engine.module.model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict().items():
        if name not in parameters or not parameters[name].requires_grad:
            yield name, value.to("cpu", dtype if name in parameters else value.dtype)


def _set_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the saved weights to config.json, which has the dtype of the training."""
    _update_json(folder / "config.json", {"dtype": str(dtype).removeprefix("torch.")})


def _fix_adapter_config(config: Path, run: TrainingRun) -> None:
    """Write the base's name, not its local path, to adapter_config.json, and sort modules, which PEFT does not."""
    changes: dict[str, object] = {"base_model_name_or_path": run.plan.base.name, "revision": run.plan.base_revision}
    values = json.loads(config.read_text(encoding="utf-8"))
    for name in ("target_modules", "feedforward_modules"):
        if isinstance(values.get(name), list):
            changes[name] = sorted(values[name])
    _update_json(config, changes)


def _update_json(file: Path, changes: dict[str, object]) -> None:
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    write_text_atomically(file, json.dumps(values, indent=2, sort_keys=True) + "\n")
