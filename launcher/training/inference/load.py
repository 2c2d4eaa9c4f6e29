"""Load a trained expert for inference: the published base and its adapter, or a fully trained model."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from launcher.base_models.catalogue import TINY_BASE_FOLDER, TINY_BASE_NAME, find_config
from launcher.core.choices import ALL_LINEAR, DTYPE_BYTES, Dtype
from launcher.core.errors import InputError, escape, first_line
from launcher.core.log import get_logger
from launcher.corpus.template_sandbox import limit_time
from launcher.manifest.parse_json import shorten
from launcher.manifest.trust import allow_remote_code
from launcher.plan.model import Plan, QuantizationPlan
from launcher.request.request import base_folders
from launcher.training.inference.trained_run import PATTERN_FIELDS, PATTERN_SECONDS, TrainedRun
from launcher.training.model.base_model import DTYPES, is_nf4_sharded, load_base, needs_eager_attention
from launcher.training.model.nf4_linear import round_to_nf4

log = get_logger(__name__)

# What libraries raise on files that are damaged, or of another model; RecursionError is a RuntimeError.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
)
_MEMORY_FACTOR = 1.3  # GPU memory relative to the weights: activations, logits, allocator


def get_published_dtype(run: TrainedRun) -> Dtype:
    """Return the dtype of the published base, or the dtype in which a fully trained model was saved."""
    return run.plan.precision.compute_dtype if run.is_full else get_base_dtype(run.plan)


def get_base_dtype(plan: Plan) -> Dtype:
    """Return the dtype from the base's config.json; bf16 if it has none."""
    config: Any = _load_config(plan)
    text = None if config is None else config.get_text_config()
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    return next((name for name, value in DTYPES.items() if value == dtype), "bf16")


def _load_config(plan: Plan) -> Any:
    if plan.base.name == TINY_BASE_NAME:
        source = TINY_BASE_FOLDER
    else:
        config = find_config(plan.base.name, base_folders(Path(plan.data.folder)))
        source = Path(plan.base.name) if config is None else config.parent
    trusts = allow_remote_code(plan.trust_remote_code, plan.base.name)
    try:
        return AutoConfig.from_pretrained(str(source), revision=plan.base_revision, trust_remote_code=trusts)
    except (OSError, ValueError):
        return None  # loading the base reports what is missing and where it was searched


def pick_device(plan: Plan, dtype: Dtype) -> torch.device:
    """Return the GPU if the weights fit its free memory, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info()
    fits = plan.base.num_parameters * DTYPE_BYTES[dtype] * _MEMORY_FACTOR < free
    return torch.device("cuda", torch.cuda.current_device()) if fits else torch.device("cpu")


def pick_dtype(plan: Plan, dtype: Dtype, device: torch.device) -> Dtype:
    """Return fp32 if the CPU has no instructions for `dtype`, whose matmuls would be about a hundred times slower.

    Otherwise, or if the weights in fp32 do not fit the available memory, return `dtype`.
    """
    if device.type != "cpu" or dtype == "fp32" or _has_cpu_matmuls(dtype):
        return dtype
    needed = plan.base.num_parameters * DTYPE_BYTES["fp32"] * _MEMORY_FACTOR
    return "fp32" if needed < psutil.virtual_memory().available else dtype


def _has_cpu_matmuls(dtype: Dtype) -> bool:
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported", None)  # None: torch without oneDNN
    return is_supported is not None and is_supported()


def load_trained_model(
    run: TrainedRun, dtype: Dtype, device: torch.device, *, quantized: bool = False, casts_adapter: bool = False
) -> PreTrainedModel | PeftModel:
    """Load base and adapter in evaluation mode.

    The base has the values that training computed with: those of NF4 after QLoRA, by default stored in `dtype`.
    PEFT loads the adapter in FP32 unless it is cast to the dtype of the base, in which training computes it.
    """
    if run.is_full:
        return load_from_folder(run.paths.adapter, dtype, device, trusts=run.trusts_code)
    if run.plan.quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"{run.paths.root}: trained on a base in NF4 (QLoRA), which needs the package bitsandbytes to load",
            hint="pip install 'expert-launcher[cuda]'",
        )
    base = load_published_base(run.plan, dtype, device, quantized=quantized)
    if run.plan.quantization is not None and not quantized:
        _round_to_trained(base, run.plan, run.plan.quantization)
    try:
        names = read_finite_names(run.paths.adapter / "adapter_model.safetensors")
        config = _load_adapter_config(base, run.paths.adapter)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # PEFT would leave them untrained
            model = PeftModel.from_pretrained(
                base, str(run.paths.adapter), config=config, autocast_adapter_dtype=not casts_adapter
            )
    except UserWarning:
        raise InputError(
            f"{run.paths.adapter} is incomplete: weights of modules that adapter_config.json names are missing",
            hint="it was damaged, or its files belong to different adapters",
        ) from None
    except _LOADING_ERRORS as error:
        raise InputError(
            f"{run.paths.adapter} is not compatible with {run.plan.base.name}: {first_line(error)}"
        ) from None
    _warn_unused(model, run.paths.adapter, names)
    if not (quantized and run.plan.quantization is not None):
        model.to(device)
    return model.eval()


def read_finite_names(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file; raise ValueError if one has NaN or infinite values."""
    with safe_open(str(file), framework="pt") as source:
        names = list(source.keys())
        for name in names:
            if not source.get_tensor(name).float().isfinite().all():
                raise ValueError(f"{name} has NaN or infinite values")
    return names


def _warn_unused(model: PeftModel, folder: Path, names: list[str]) -> None:
    """Warn about weights of an adapter that the model has no module for: PEFT leaves them out without a word."""
    known = get_peft_model_state_dict(model, save_embedding_layers=False).keys() | model.state_dict().keys()
    if unused := sorted(set(names) - known):
        log.warning(f"{folder}: {len(unused)} weights are not used, such as {escape(unused[0])}")


def _round_to_trained(base: PreTrainedModel, plan: Plan, quantization: QuantizationPlan) -> None:
    round_to_nf4(
        base,
        DTYPES[plan.precision.base_dtype],
        double_quantization=quantization.double_quantization,
        sharded=is_nf4_sharded(plan),
    )


def _load_adapter_config(base: PreTrainedModel, folder: Path) -> PeftConfig:
    """Load PEFT's config of an adapter, with the modules that its patterns match: PEFT has no time limit for them."""
    config = PeftConfig.from_pretrained(str(folder))
    paths = [path for path, _ in base.named_modules()]
    for field in PATTERN_FIELDS:
        pattern = getattr(config, field, None)
        if not isinstance(pattern, str) or (field == "target_modules" and pattern.lower() == ALL_LINEAR):
            continue
        with limit_time(PATTERN_SECONDS, ValueError(f"{field} takes more than {PATTERN_SECONDS} s to match")):
            matched = {path for path in paths if re.fullmatch(pattern, path)}
        if field == "target_modules" and not matched:
            raise ValueError(f"{field} {shorten(pattern)!r} matches no module")
        setattr(config, field, matched)
    return config


def load_published_base(plan: Plan, dtype: Dtype, device: torch.device, *, quantized: bool = False) -> PreTrainedModel:
    """Load the base without adapter, in evaluation mode."""
    precision = plan.precision.model_copy(update={"base_dtype": dtype})
    changes: dict[str, Any] = {"precision": precision, "strategy": "single"}
    if not quantized:
        changes["quantization"] = None
    single = plan.model_copy(update=changes)
    base = load_base(single, base_folders(Path(plan.data.folder)), _pick_attention(single), device)
    return base.eval()


def _pick_attention(plan: Plan) -> str:
    config = _load_config(plan)
    return "eager" if config is not None and needs_eager_attention(config) else "sdpa"


def load_from_folder(folder: Path, dtype: Dtype, device: torch.device, *, trusts: bool = False) -> PreTrainedModel:
    """Load a model with transformers alone, as other users would."""
    try:
        config: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=trusts)
        # config.json may name a kernel, which transformers would download and import.
        config._attn_implementation = "eager" if needs_eager_attention(config) else "sdpa"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=DTYPES[dtype],
            trust_remote_code=trusts,
            use_safetensors=True,
            output_loading_info=True,
        )
    except _LOADING_ERRORS as error:
        raise InputError(f"{folder} cannot be loaded: {first_line(error)}") from None
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):  # transformers would use random ones
        raise InputError(f"{folder} is incomplete: {len(missing)} weights are missing, such as {missing[0]}")
    model.to(device)  # type: ignore[arg-type]
    return model.eval()
