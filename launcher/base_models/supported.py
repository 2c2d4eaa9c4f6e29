"""Checks of a `config.json`: the kinds of base models that cannot be trained, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.base_models.families import FAMILIES, UNTRAINABLE
from launcher.core.errors import InputError, Problem

ConfigKeys = Mapping[str, object]  # keys of a config.json, not yet validated

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OTHER_TOWERS = ("vision_config", "audio_config", "speech_config")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "Gemma3ForConditionalGeneration")
_STATE_SPACE_KEYS = ("mamba_", "ssm_", "state_size")
_LIKE_LAYERS = frozenset({"full_attention", "sliding_attention"})


def make_problem(key: str, what: str) -> Problem:
    """Return a problem of one key of a config."""
    return Problem(where=key, what=what)


def check_supported(config: ConfigKeys, name: str) -> None:
    """Raise InputError if a base model is of a kind that is not supported."""
    problems = tuple(problem for check in _CHECKS if (problem := check(config)))
    if problems:
        raise make_not_supported_error(name, problems)


def make_not_supported_error(name: str, problems: tuple[Problem, ...]) -> InputError:
    """Return the error for a base model with these problems."""
    return InputError(
        f"the base model {name} is of a kind that is not supported",
        problems,
        "name a decoder-only language model, such as Qwen/Qwen3-0.6B",
    )


def _check_model_type(config: ConfigKeys) -> Problem | None:
    value = config.get("model_type")
    if isinstance(value, str) and value:
        reason = UNTRAINABLE.get(value)
        return make_problem("model_type", f"{value}: {reason}") if reason else None
    return make_problem("model_type", "is missing" if value is None else f"must be a name, not {value!r}")


def _check_experts(config: ConfigKeys) -> Problem | None:
    """Refuse mixture-of-experts models of families that are not known to train, and layers without experts in others.

    Their weights, their active parameters and their router differ from family to family.
    """
    known = sorted(name for name, family in FAMILIES.items() if family.experts is not None)
    if config.get("model_type") in known:
        dense, every = config.get("mlp_only_layers"), config.get("decoder_sparse_step")
        if dense or every not in (None, 1):
            key = "mlp_only_layers" if dense else "decoder_sparse_step"
            return make_problem(key, "some layers have no experts: all layers must be of the same build")
        return None
    text = config.get("text_config")
    for keys in (config, text if isinstance(text, Mapping) else {}):
        for key in _EXPERT_KEYS:
            count = keys.get(key)
            if isinstance(count, int) and count > 1:
                reason = f"supported mixtures of experts: {', '.join(known)}"
                return make_problem(key, f"{count}: {config.get('model_type')} is not supported ({reason})")
    return None


def _check_decoder(config: ConfigKeys) -> Problem | None:
    if config.get("is_encoder_decoder") is True:
        return make_problem(
            "is_encoder_decoder", "encoder-decoder models are not supported: experts train on a decoder alone"
        )
    return None


def _check_text(config: ConfigKeys) -> Problem | None:
    towers = [key for key in _OTHER_TOWERS if config.get(key)]
    if towers and config.get("model_type") != "gemma3":
        return make_problem(towers[0], "models of images or sound are not supported: experts train on text")
    return None


def _check_attention(config: ConfigKeys) -> Problem | None:
    """Refuse multi-head latent attention (DeepSeek, Youtu), whose values are of other sizes than queries and keys."""
    if config.get("kv_lora_rank"):
        return make_problem(
            "kv_lora_rank", "multi-head latent attention is not supported by attention over packed documents"
        )
    return None


def _check_unquantized(config: ConfigKeys) -> Problem | None:
    """Refuse quantized weights. Those of gpt-oss (MXFP4) are dequantized when they are loaded."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    method = quantization.get("quant_method")
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return None
    return make_problem(
        "quantization_config",
        f"the weights are already quantized ({method}): name the original base; `quantization: int4` quantizes it",
    )


def _check_head(config: ConfigKeys) -> Problem | None:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or any(str(name).endswith(_LANGUAGE_MODELS) for name in names):
        return None
    return make_problem("architectures", f"{', '.join(map(str, names))} is not a causal language model")


def _check_layers(config: ConfigKeys) -> Problem | None:
    kinds = config.get("layer_types")
    unlike = sorted({str(kind) for kind in kinds} - _LIKE_LAYERS) if isinstance(kinds, list) else []
    if unlike:
        return make_problem(
            "layer_types", f"{', '.join(unlike)}: all layers must be attention layers of the same build"
        )
    state_space = sorted(key for key in config if key.startswith(_STATE_SPACE_KEYS))
    if state_space:
        reason = "layers with a state space (Mamba) are not supported: packed documents would share it"
        return make_problem(state_space[0], reason)
    return None


_CHECKS = (
    _check_model_type,
    _check_experts,
    _check_decoder,
    _check_text,
    _check_attention,
    _check_unquantized,
    _check_head,
    _check_layers,
)
