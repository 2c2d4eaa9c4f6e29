"""A small configuration of any text-generation model that transformers knows, from the names of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from tests.training.builders import SIZES

_MAX_PARAMETERS = 30_000_000
# Names of keys with the same meaning -> a small value.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "input_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 1),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "d_inner", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "global_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank", "kv_lora_rank", "rotary_dim"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), SIZES["vocab_size"]),
    **dict.fromkeys(("hidden_size_per_layer_input", "sliding_window", "attention_window", "type_vocab_size"), 8),
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"), 0.0),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    "initializer_range": SIZES["initializer_range"],
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Lists with one entry per layer, which most config classes make themselves if they are absent.
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "moe_layer_freq")
_EXPANDED = {"mamba_n_heads": 4, "mamba_d_ssm": 64, "num_heads": 4, "head_dim": 16}  # twice hidden_size in all heads
# What config classes require in addition.
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2"), _EXPANDED),
    "diffllama": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {"is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}


def make_tiny_config(model_type: str) -> PretrainedConfig:
    """Return a small config; raise ValueError if the model of it is not small, or whatever its class raises."""
    try:
        return _check_small(_shrink(CONFIG_MAPPING[model_type], model_type, keeps_lists=False))
    except Exception:  # not all classes make lists of their layers themselves
        return _check_small(_shrink(CONFIG_MAPPING[model_type], model_type, keeps_lists=True))


def _check_small(config: PretrainedConfig) -> PretrainedConfig:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters: it has other keys for its sizes")
    return config


def _shrink(kind: type[PretrainedConfig], model_type: str, *, keeps_lists: bool) -> PretrainedConfig:
    default = kind()
    own: Mapping[str, Any] = default.to_dict()
    values: dict[str, Any] = {}
    for key, value in _SMALL.items():
        if not _takes(default, own, key):
            continue
        before = own.get(key)
        values[key] = [value] * 2 if isinstance(before, list) else int(value) if isinstance(before, int) else value
    for key, part in vars(default).items():
        if isinstance(part, PretrainedConfig):
            values[key] = _shrink(type(part), part.model_type, keeps_lists=keeps_lists)
        elif key in _PER_LAYER and isinstance(part, list):
            values[key] = part[:2] if keeps_lists else None
    return kind(**values | _OWN.get(model_type, {}))


def _takes(default: PretrainedConfig, own: Mapping[str, Any], key: str) -> bool:
    attribute = getattr(type(default), key, None)
    return key in own or key in default.attribute_map or (attribute is not None and not isinstance(attribute, property))
