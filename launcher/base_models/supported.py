"""Checks of a `config.json`: the kinds of base models that cannot be trained, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from launcher.base_models.families import FAMILIES, UNTRAINABLE
from launcher.core.errors import InputError, Problem

ConfigKeys = Mapping[str, object]  # keys of a config.json, not yet validated

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OTHER_TOWERS = ("vision_config", "audio_config", "speech_config")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "Gemma3ForConditionalGeneration")
_STATE_SPACE_KEYS = ("mamba_", "ssm_", "state_size")
# Keys of families with convolutions or linear attention (LFM2, Qwen3.5) by default, if the config has no layer_types.
_HYBRID_KEY = re.compile(r"(^|_)conv(1d)?_|^linear_(conv|key|num|attn)_")
_LIKE_LAYERS = frozenset({"full_attention", "sliding_attention"})


def check_supported(config: ConfigKeys, name: str) -> None:
    """Raise InputError if a config.json describes a model that cannot be trained, such as an encoder-decoder."""
    problems = tuple(_find_problems(config))
    if problems:
        raise make_not_supported_error(name, problems)


def make_not_supported_error(name: str, problems: tuple[Problem, ...]) -> InputError:
    """Return the error for a base model that is not supported, with the problems that show it."""
    return InputError(
        f"the base model {name} is not supported",
        problems,
        "name a decoder-only language model, such as Qwen/Qwen3-0.6B",
    )


def _find_problems(config: ConfigKeys) -> Iterator[Problem]:
    """Yield a problem for each reason why a model cannot be trained, with the config.json key that shows it."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        what = "is missing" if model_type is None else f"must be a name, not {model_type!r}"
        yield Problem(where="model_type", what=what)
    elif model_type in UNTRAINABLE:
        yield Problem(where="model_type", what=f"{model_type}: {UNTRAINABLE[model_type]}")
    yield from _find_expert_problems(config)
    if config.get("is_encoder_decoder") is True:
        what = "encoder-decoder models are not supported: experts are trained on decoder-only models"
        yield Problem(where="is_encoder_decoder", what=what)
    towers = [key for key in _OTHER_TOWERS if config.get(key)]
    if towers and model_type != "gemma3":
        yield Problem(where=towers[0], what="vision and audio models are not supported: experts train on text")
    if config.get("kv_lora_rank"):  # DeepSeek, Youtu: values are of other sizes than queries and keys
        what = "multi-head latent attention is not supported by attention over packed documents"
        yield Problem(where="kv_lora_rank", what=what)
    yield from _find_attention_problems(config)
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    is_dequantized = method == "mxfp4" and model_type == "gpt_oss"  # when it is loaded
    if isinstance(quantization, Mapping) and not is_dequantized:
        what = (
            f"the weights are already quantized ({method}): name the original base; `quantization: int4` quantizes it"
        )
        yield Problem(where="quantization_config", what=what)
    names = config.get("architectures")
    if isinstance(names, list) and names and not any(str(name).endswith(_LANGUAGE_MODELS) for name in names):
        yield Problem(where="architectures", what=f"{', '.join(map(str, names))} is not a causal language model")
    yield from _find_layer_problems(_merge_text_config(config))


def _find_layer_problems(config: ConfigKeys) -> Iterator[Problem]:
    """Yield a problem if some layers are not attention layers."""
    kinds = config.get("layer_types")
    unlike = sorted({str(kind) for kind in kinds} - _LIKE_LAYERS) if isinstance(kinds, list) else []
    state_space = sorted(key for key in config if key.startswith(_STATE_SPACE_KEYS))
    hybrid = sorted(key for key in config if _HYBRID_KEY.search(key)) if not isinstance(kinds, list) else []
    if unlike:
        what = f"{', '.join(unlike)}: all layers must be attention layers of the same structure"
        yield Problem(where="layer_types", what=what)
    elif state_space:
        what = "state-space layers (Mamba) are not supported: packed documents would share their state"
        yield Problem(where=state_space[0], what=what)
    elif hybrid:
        what = "convolutions and linear attention are not supported: packed documents would share their state"
        yield Problem(where=hybrid[0], what=what)


def _merge_text_config(config: ConfigKeys) -> ConfigKeys:
    """Return the config with the keys of the language model that some families nest."""
    text = config.get("text_config")
    return {**(text if isinstance(text, Mapping) else {}), **config}


def _find_attention_problems(config: ConfigKeys) -> Iterator[Problem]:
    """Yield a problem if tokens attend to later ones, as in embedding models; Gemma 3 nests the key for it."""
    keys = _merge_text_config(config)
    for key, values in (("use_bidirectional_attention", (True, "all")), ("is_causal", (False,))):
        if keys.get(key) in values:
            what = "its tokens attend to later ones: it is an embedding model, not a causal language model"
            yield Problem(where=key, what=what)
            return


def _find_expert_problems(config: ConfigKeys) -> Iterator[Problem]:
    """Yield a problem for mixtures of experts of unsupported families, or with some layers that have no experts.

    Expert weights, active parameters and routers differ from family to family.
    """
    known = sorted(name for name, family in FAMILIES.items() if family.experts is not None)
    if config.get("model_type") in known:
        dense, every = config.get("mlp_only_layers"), config.get("decoder_sparse_step")
        if dense or every not in (None, 1):
            key = "mlp_only_layers" if dense else "decoder_sparse_step"
            yield Problem(where=key, what="some layers have no experts: all layers must have the same structure")
        return
    keys = _merge_text_config(config)
    for key in _EXPERT_KEYS:
        count = keys.get(key)
        if isinstance(count, int) and count > 1:
            reason = f"is not supported as a mixture of experts (supported: {', '.join(known)})"
            yield Problem(where=key, what=f"{count}, but {config.get('model_type')} {reason}")
            return
