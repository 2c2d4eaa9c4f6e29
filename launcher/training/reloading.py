"""A trained expert, loaded again: its base as it was published, and what was trained on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from launcher.bases import TINY_BASE_FOLDER, TINY_BASE_NAME, find_config
from launcher.choices import DTYPE_BYTES, Dtype
from launcher.errors import InputError, first_line
from launcher.inputs import base_folders
from launcher.plan.model import Plan
from launcher.training.finished import FinishedRun
from launcher.training.loading import DTYPES, caps_scores, load_base

_ROOM = 1.3  # of a card, beside the weights: activations, logits, the allocator


def find_published_dtype(run: FinishedRun) -> Dtype:
    """As the base's config.json says; bf16 where it says nothing. A fully trained model has what it was saved in."""
    return run.plan.precision.compute_dtype if run.is_full else find_dtype_of_base(run.plan)


def find_dtype_of_base(plan: Plan) -> Dtype:
    config: Any = _load_config(plan)
    text = None if config is None else config.get_text_config()
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    return next((name for name, value in DTYPES.items() if value == dtype), "bf16")


def _load_config(plan: Plan) -> Any:
    if plan.base.name == TINY_BASE_NAME:
        source = TINY_BASE_FOLDER
    else:
        found = find_config(plan.base.name, base_folders(Path(plan.data.folder)))
        source = Path(plan.base.name) if found is None else found.parent
    try:
        return AutoConfig.from_pretrained(
            str(source), revision=plan.base_revision, trust_remote_code=plan.trust_remote_code
        )
    except (OSError, ValueError):
        return None  # loading the base will say what is missing, and where was looked


def pick_device(plan: Plan, dtype: Dtype) -> torch.device:
    """The GPU, where the weights fit into what is free of it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info()
    fits = plan.base.num_parameters * DTYPE_BYTES[dtype] * _ROOM < free
    return torch.device("cuda", torch.cuda.current_device()) if fits else torch.device("cpu")


def load_expert(
    run: FinishedRun, dtype: Dtype, device: torch.device, *, quantized: bool = False
) -> PreTrainedModel | PeftModel:
    """In evaluation mode. Unquantised unless asked: an adapter goes with the base as it was published."""
    if run.is_full:
        return load_folder(run.paths.adapter, dtype, device, trusts=run.plan.trust_remote_code)
    base = load_published_base(run.plan, dtype, device, quantized=quantized)
    try:
        model = PeftModel.from_pretrained(base, str(run.paths.adapter))
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(f"{run.paths.adapter} does not go with {run.plan.base.name}: {first_line(error)}") from None
    if not (quantized and run.plan.quantization is not None):
        model.to(device)
    return model.eval()


def load_published_base(plan: Plan, dtype: Dtype, device: torch.device, *, quantized: bool = False) -> PreTrainedModel:
    precision = plan.precision.model_copy(update={"base_dtype": dtype})
    changes: dict[str, Any] = {"precision": precision, "strategy": "single"}
    if not quantized:
        changes["quantization"] = None
    alone = plan.model_copy(update=changes)
    base = load_base(alone, base_folders(Path(plan.data.folder)), _pick_attention(alone), device)
    return base.eval()


def _pick_attention(plan: Plan) -> str:
    config = _load_config(plan)
    return "eager" if config is not None and caps_scores(config) else "sdpa"


def load_folder(folder: Path, dtype: Dtype, device: torch.device, *, trusts: bool = False) -> PreTrainedModel:
    """As anybody would, by transformers alone."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=DTYPES[dtype], trust_remote_code=trusts
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(f"{folder} cannot be loaded: {first_line(error)}") from None
    model.to(device)  # type: ignore[arg-type]
    return model.eval()
