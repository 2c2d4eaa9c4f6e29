"""Find and load the base model in the planned dtype and quantization. Errors list where it was searched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.utils.quantization_config import Mxfp4Config

from launcher.base_models.catalogue import TINY_BASE_FOLDER, TINY_BASE_NAME, find_config, lookup_base
from launcher.base_models.families import FAMILIES
from launcher.base_models.missing_files import (
    describe_download_error,
    describe_missing_weights,
    describe_old_weights,
)
from launcher.core.choices import FSDP_STRATEGIES, Dtype
from launcher.core.errors import InputError, Problem, first_line
from launcher.manifest.trust import allow_remote_code
from launcher.plan.model import Plan, QuantizationPlan
from launcher.training.model.new_tokens import add_new_rows, get_new_token_ids
from launcher.training.model.nf4_linear import replace_linears, shard_nf4_weights

DTYPES: Mapping[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_RANDOM_WEIGHTS_SEED = 20_261_115  # fixed, so that random weights are the same everywhere
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # per file, evenly spaced; the first one contains its header
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Outputs that a published config.json may ask for; training needs none of them.
_OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}


def load_base(plan: Plan, folders: tuple[Path, ...], attention: str, device: torch.device) -> PreTrainedModel:
    """Load the base model and add embedding rows for new tokens. `attention` is the registered name of a backend."""
    model = _load(plan, folders, attention, device)
    if is_nf4_sharded(plan):
        shard_nf4_weights(model, device, DTYPES[plan.precision.compute_dtype])
    if ids := get_new_token_ids(plan, folders):
        add_new_rows(model, ids)
    return model


def is_nf4_sharded(plan: Plan) -> bool:
    """Return whether to load the base unquantized and quantize it here, to NF4 parameters that FSDP2 can shard."""
    return plan.quantization is not None and plan.strategy in FSDP_STRATEGIES


def _load(plan: Plan, folders: tuple[Path, ...], attention: str, device: torch.device) -> PreTrainedModel:
    if plan.base.name == TINY_BASE_NAME:
        return _load_tiny(plan, attention)
    source = _locate(plan, folders)
    _check_positions(plan, source)
    if plan.random_weights:
        return _build_random(plan, source, attention, device)
    options: dict[str, Any] = {
        "dtype": DTYPES[plan.precision.base_dtype],
        "attn_implementation": attention,
        "revision": plan.base_revision,
        "trust_remote_code": allow_remote_code(plan.trust_remote_code, plan.base.name),
        **_OUTPUTS,
    }
    if device.type == "cuda" and plan.strategy in ("single", "ddp"):
        options["device_map"] = {"": device}
    if plan.quantization is not None and not is_nf4_sharded(plan):
        options["quantization_config"] = make_quantization_config(plan, plan.quantization)
    try:
        if plan.base.model_type == "gpt_oss" and _is_quantized(source, options):
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except Exception as error:  # of damaged files, of a wrong config.json, of a model's own code
        raise _make_load_error(plan, source, folders, error) from None
    model, info = loaded
    _check_sizes(plan, source, sorted(info["mismatched_keys"]))
    _check_complete(plan, source, sorted(info["missing_keys"]))
    checked: PreTrainedModel = model
    return checked


def _is_quantized(source: str, options: Mapping[str, Any]) -> bool:
    """Return whether the published config.json has a quantization_config, as that of gpt-oss has."""
    known = {name: options[name] for name in ("revision", "trust_remote_code")}
    return getattr(AutoConfig.from_pretrained(source, **known), "quantization_config", None) is not None


def needs_eager_attention(config: PretrainedConfig) -> bool:
    """Return whether the model needs eager attention: SDPA has neither a softcap (Gemma 2) nor sinks (gpt-oss)."""
    text = config.get_text_config()
    has_sinks = text.model_type in FAMILIES and FAMILIES[text.model_type].has_sinks
    return has_sinks or getattr(text, "attn_logit_softcapping", None) is not None


def fingerprint_base(plan: Plan, model: PreTrainedModel) -> str:
    """Return a fingerprint of the base's weights: of file sizes and sampled bytes, a Hub commit, or a random seed."""
    if plan.random_weights:
        return f"drawn:{_RANDOM_WEIGHTS_SEED}:{plan.base.name}"
    folder = TINY_BASE_FOLDER if plan.base.name == TINY_BASE_NAME else Path(str(model.config._name_or_path))
    if not folder.is_dir():
        return f"hub:{plan.base.name}@{getattr(model.config, '_commit_hash', None)}"
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as source:
            for index in range(_SAMPLES):
                source.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(source.read(_SAMPLE_BYTES))
    return f"files:{digest.hexdigest()}"


def _check_sizes(plan: Plan, source: str, mismatched: list[tuple[str, list[int], list[int]]]) -> None:
    """Raise InputError if weights do not have the shapes of config.json: transformers would use random ones instead."""
    if mismatched:
        problems = (Problem(where=name, what=f"{[*own]}, not {[*built]}") for name, own, built in mismatched[:3])
        raise InputError(
            f"{plan.base.name}: {len(mismatched)} weights in {source} have other sizes than config.json says",
            tuple(problems),
            hint="config.json and weights belong to different models, or one of them was changed; download both again",
        )


def _check_complete(plan: Plan, source: str, missing: list[str]) -> None:
    """Raise InputError if weights are missing: transformers would initialize them randomly, with only a warning."""
    if missing:
        raise InputError(
            f"{plan.base.name}: {source} lacks {len(missing)} of its weights: {', '.join(missing[:3])}"
            + (", …" if len(missing) > 3 else ""),
            hint="download it again, and check that config.json belongs to the same model",
        )


def _locate(plan: Plan, folders: tuple[Path, ...]) -> str:
    """Return the folder with the base's files, or its name on the Hub if it must be downloaded."""
    config = find_config(plan.base.name, folders)
    if config is None:
        return plan.base.name
    if not plan.random_weights and not any(any(config.parent.glob(pattern)) for pattern in _WEIGHTS):
        if "snapshots" in config.parts:  # the Hub's cache: the weights can still be downloaded
            return plan.base.name
        raise InputError(
            f"{plan.base.name}: {config.parent} has a config.json, but no weights (*.safetensors)",
            hint=describe_old_weights(plan.base.name, folders)
            or "download them there, or measure speed and memory without them: --random-weights",
        )
    if not plan.random_weights and (problem := describe_missing_weights(plan.base.name, folders)):
        raise InputError(problem)
    return str(config.parent)


def _make_load_error(plan: Plan, source: str, folders: tuple[Path, ...], error: Exception) -> InputError:
    reason = first_line(error)
    if not isinstance(error, (OSError, ValueError, RuntimeError, SafetensorError)):  # their texts need their names
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if "trust_remote_code" in str(error) and not plan.trust_remote_code:
        return InputError(
            f"{plan.base.name}: transformers does not know its model_type, and the code of {source} is not trusted",
            hint="check the Python files, then set base_models[0].trust_remote_code to true and revision to a commit",
        )
    if Path(source).is_dir():
        return InputError(
            f"{plan.base.name}: {source} cannot be loaded: {reason}",
            hint=f"AutoModelForCausalLM.from_pretrained({source!r}) shows the whole error",
        )
    searched = tuple(Problem(where="not in", what=str(folder / plan.base.name)) for folder in folders)
    why, way_out = describe_download_error(plan.base.name, error)
    hub = Problem(where="not downloaded", what=f"{why}: {reason}")
    return InputError(
        f"{plan.base.name}: weights not found",
        (*searched, hub),
        f"{way_out}; or set LAUNCHER_MODELS_DIR to the folder that contains it, or pass a folder with --base",
    )


def _check_positions(plan: Plan, source: str) -> None:
    """Raise InputError if config.json has fewer positions than planned: the plan may use a catalogue entry."""
    file = Path(source) / "config.json"
    positions = json.loads(file.read_text()).get("max_position_embeddings") if file.is_file() else None
    if isinstance(positions, int) and positions < plan.batch.sequence_length:
        raise InputError(
            f"{file}: the model has {positions} positions, fewer than the sequence length {plan.batch.sequence_length}",
            hint=f"--set training.config.max_seq_length={positions}",
        )


def _load_tiny(plan: Plan, attention: str) -> PreTrainedModel:
    """Load the bundled tiny base on the CPU; ZeRO-3 does not partition it while it loads."""
    config = AutoConfig.from_pretrained(str(TINY_BASE_FOLDER))
    with torch.random.fork_rng(devices=[]), _without_zero3_init():
        torch.manual_seed(_RANDOM_WEIGHTS_SEED)
        model = _from_config(config, attention, torch.float32)
    if not plan.random_weights:
        _load_tiny_weights(plan, model)
    return model.to(DTYPES[plan.precision.base_dtype])  # type: ignore[arg-type]


def _load_tiny_weights(plan: Plan, model: PreTrainedModel) -> None:
    """Load the tiny base's weights; its file has no LM head, which is tied to the embeddings."""
    try:
        weights = load_file(TINY_BASE_FOLDER / "model.safetensors")
        result = model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _make_load_error(plan, str(TINY_BASE_FOLDER), (), error) from None
    _check_complete(plan, str(TINY_BASE_FOLDER), [name for name in result.missing_keys if name != "lm_head.weight"])


@contextmanager
def _without_zero3_init() -> Iterator[None]:
    """Disable ZeRO-3's partitioned initialization, which leaves only shards to initialize or to quantize.

    DeepSpeed partitions the weights later.
    """
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = reference


def _from_config(config: PretrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model


def _build_random(plan: Plan, source: str, attention: str, device: torch.device) -> PreTrainedModel:
    """Build the base with random weights from a fixed seed, to measure speed and memory."""
    known = lookup_base(plan.base.name)
    if not Path(source).is_dir() and known is not None:  # the catalogue has the config
        config = AutoConfig.for_model(**dict(known))  # type: ignore[arg-type]
    else:
        config = AutoConfig.from_pretrained(source)
    is_quantized = plan.quantization is not None
    torch.manual_seed(_RANDOM_WEIGHTS_SEED)
    with torch.device(device), _without_zero3_init() if is_quantized else nullcontext():
        model = _from_config(config, attention, DTYPES[plan.precision.base_dtype])
    if plan.quantization is not None and not is_nf4_sharded(plan):
        _quantize_linears(model, plan, plan.quantization, device)
    return model


def make_quantization_config(plan: Plan, quantization: QuantizationPlan) -> BitsAndBytesConfig:
    """Return the bitsandbytes config for the planned quantization."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quantization.double_quantization,
        bnb_4bit_compute_dtype=DTYPES[plan.precision.compute_dtype],
        bnb_4bit_quant_storage=_get_storage_dtype(quantization),
    )


def _get_storage_dtype(quantization: QuantizationPlan) -> torch.dtype:
    return torch.uint8 if quantization.storage_dtype == "uint8" else DTYPES[quantization.storage_dtype]


def _quantize_linears(model: PreTrainedModel, plan: Plan, quantization: QuantizationPlan, device: torch.device) -> None:
    """Quantize the decoder layers' linear modules, as transformers does while loading."""
    replace_linears(model, lambda linear: _quantized(linear, plan, quantization).to(device))
    marked: Any = model
    marked.is_loaded_in_4bit = True


def _quantized(linear: nn.Linear, plan: Plan, quantization: QuantizationPlan) -> nn.Module:
    import bitsandbytes as bnb

    sizes = linear.in_features, linear.out_features, linear.bias is not None
    weight = linear.weight.data
    result: Any = bnb.nn.Linear4bit(
        *sizes,
        compute_dtype=DTYPES[plan.precision.compute_dtype],
        compress_statistics=quantization.double_quantization,
        quant_type="nf4",
        device="meta",
    )
    result.weight = bnb.nn.Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=quantization.double_quantization,
        quant_type="nf4",
        quant_storage=_get_storage_dtype(quantization),
        module=result,
    )
    if linear.bias is not None:
        result.bias = linear.bias
    return result
