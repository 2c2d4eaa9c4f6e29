"""Shape of a base model from its `config.json` or the catalogue: parameters, bytes and FLOPs without loading it.

Nothing is downloaded, and torch is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launcher.base_models.catalogue import (
    find_config,
    get_hub_cache,
    get_last_component,
    load_config,
    lookup_base,
    suggest_bases,
)
from launcher.core.errors import InputError, Problem
from launcher.core.frozen_model import Frozen

Basis = Literal["catalogue", "config", "approximate"]
ConfigKeys = Mapping[str, object]  # keys of a config.json, not yet validated

_MAX_SIZE = 2**31  # of one dimension; larger values mean a broken file


class Linear(Frozen):
    """One linear layer of a decoder layer, by the name that adapters target."""

    name: str
    in_features: int
    out_features: int
    has_bias: bool = False

    @property
    def num_parameters(self) -> int:
        return self.in_features * self.out_features + (self.out_features if self.has_bias else 0)


class ModelShape(Frozen):
    """Sizes of a decoder-only language model with identical layers."""

    name: str  # as requested, such as Qwen/Qwen3-0.6B
    model_type: str  # of transformers: qwen3, llama, ...
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    linears: tuple[Linear, ...]  # of one layer
    norm_parameters_per_layer: int  # everything in a layer that is not a Linear
    other_parameters: int  # outside layers and embeddings: the final norm, a bias of the head
    gated_mlp: bool
    basis: Basis  # approximate: an architecture we do not know, read as llama's, or only the text part of Gemma 3

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the LM head if it is not tied to the embeddings."""
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        return sum(linear.num_parameters for linear in self.linears) + self.norm_parameters_per_layer

    @property
    def num_parameters(self) -> int:
        return (
            self.embedding_parameters
            + self.head_parameters
            + self.num_layers * self.layer_parameters
            + self.other_parameters
        )

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Return the module names that an adapter can target."""
        return tuple(linear.name for linear in self.linears)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """How a model type of transformers builds a layer, and the defaults of its config class."""

    layout: Literal["split", "fused", "phi"] = "split"
    has_qkv_bias: bool = False  # whatever the config says
    bias_keys: frozenset[str] = frozenset()  # the bias switches of the config that it obeys
    norms_per_layer: int = 2
    has_qk_norm: bool = False
    defaults: ConfigKeys = field(default_factory=dict)


_BOTH_BIASES = frozenset({"attention_bias", "mlp_bias"})
_ATTENTION_BIAS = frozenset({"attention_bias"})
_GEMMA_DEFAULTS: ConfigKeys = {"head_dim": 256, "tie_word_embeddings": True}
_LLAMA = _Family(bias_keys=_BOTH_BIASES, defaults={"max_position_embeddings": 2048})

# Defaults of the config classes of transformers 5.22. Essential sizes have none, so that a broken file is reported;
# Gemma 3 is the exception, because its published files omit them.
_FAMILIES: Mapping[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _Family(defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072}),
    "qwen2": _Family(has_qkv_bias=True, defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768}),
    "qwen3": _Family(
        bias_keys=_ATTENTION_BIAS,
        has_qk_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    ),
    "phi3": _Family(layout="fused", defaults={"max_position_embeddings": 4096}),
    "phi": _Family(layout="phi", defaults={"max_position_embeddings": 2048}),
    "gemma": _Family(
        bias_keys=_ATTENTION_BIAS,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    ),
    "gemma2": _Family(
        bias_keys=_ATTENTION_BIAS,
        norms_per_layer=4,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 8192},
    ),
    "gemma3_text": _Family(
        bias_keys=_ATTENTION_BIAS,
        norms_per_layer=4,
        has_qk_norm=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
    ),
    "smollm3": _Family(
        bias_keys=_BOTH_BIASES,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int


def make_shape(config: ConfigKeys, name: str, basis: Literal["catalogue", "config"]) -> ModelShape:
    """Return the shape of the model that transformers would build from a config.json."""
    _check_supported(config, name)
    config, is_exact = _text_part(config)
    model_type = str(config["model_type"])
    family = _FAMILIES.get(model_type, _LLAMA)
    keys = {**family.defaults, **config}
    sizes, flags = _read_keys(keys, family, name)
    return ModelShape(
        name=name,
        model_type=model_type,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate,
        vocab_size=sizes.vocab,
        max_positions=sizes.max_positions,
        tied_embeddings=flags["tie_word_embeddings"],
        linears=_make_linears(sizes, family, flags),
        norm_parameters_per_layer=_count_norms(sizes, family, flags),
        other_parameters=2 * sizes.hidden + sizes.vocab if family.layout == "phi" else sizes.hidden,
        gated_mlp=family.layout != "phi",
        basis=basis if is_exact and model_type in _FAMILIES else "approximate",
    )


def _text_part(config: ConfigKeys) -> tuple[ConfigKeys, bool]:
    """Return the language model's config: Gemma 3 from 4B up nests it; its vision tower is not counted."""
    text = config.get("text_config")
    if config.get("model_type") == "gemma3" and isinstance(text, Mapping):
        return {"model_type": "gemma3_text", **text}, False
    return config, True


def _make_linears(sizes: _Sizes, family: _Family, flags: Mapping[str, bool]) -> tuple[Linear, ...]:
    hidden, inner = sizes.hidden, sizes.intermediate
    query, key_value = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    if family.layout == "fused":
        return (
            Linear(name="qkv_proj", in_features=hidden, out_features=query + 2 * key_value),
            Linear(name="o_proj", in_features=query, out_features=hidden),
            Linear(name="gate_up_proj", in_features=hidden, out_features=2 * inner),
            Linear(name="down_proj", in_features=inner, out_features=hidden),
        )
    is_phi = family.layout == "phi"
    qkv_bias = is_phi or family.has_qkv_bias or flags["attention_bias"]
    output_bias = is_phi or flags["attention_bias"]
    return (
        Linear(name="q_proj", in_features=hidden, out_features=query, has_bias=qkv_bias),
        Linear(name="k_proj", in_features=hidden, out_features=key_value, has_bias=qkv_bias),
        Linear(name="v_proj", in_features=hidden, out_features=key_value, has_bias=qkv_bias),
        Linear(name="dense" if is_phi else "o_proj", in_features=query, out_features=hidden, has_bias=output_bias),
        *_make_mlp(hidden, inner, is_phi, flags["mlp_bias"]),
    )


def _make_mlp(hidden: int, inner: int, is_phi: bool, has_bias: bool) -> tuple[Linear, ...]:
    if is_phi:
        return (
            Linear(name="fc1", in_features=hidden, out_features=inner, has_bias=True),
            Linear(name="fc2", in_features=inner, out_features=hidden, has_bias=True),
        )
    return (
        Linear(name="gate_proj", in_features=hidden, out_features=inner, has_bias=has_bias),
        Linear(name="up_proj", in_features=hidden, out_features=inner, has_bias=has_bias),
        Linear(name="down_proj", in_features=inner, out_features=hidden, has_bias=has_bias),
    )


def _count_norms(sizes: _Sizes, family: _Family, flags: Mapping[str, bool]) -> int:
    if family.layout == "phi":  # one LayerNorm with weight and bias; optionally the same on queries and keys
        return 2 * sizes.hidden + (4 * sizes.head_dim if flags["qk_layernorm"] else 0)
    return family.norms_per_layer * sizes.hidden + (2 * sizes.head_dim if family.has_qk_norm else 0)


def _read_keys(keys: ConfigKeys, family: _Family, name: str) -> tuple[_Sizes, Mapping[str, bool]]:
    """Return sizes and flags, or raise one error that lists every wrong key."""
    problems: list[Problem] = []
    sizes = _read_sizes(keys, problems)
    flags = {key: _read_flag(keys, key, problems) for key in ("tie_word_embeddings", "qk_layernorm")}
    for key in sorted(_BOTH_BIASES):
        flags[key] = key in family.bias_keys and _read_flag(keys, key, problems)
    if problems:
        raise InputError(
            f"the configuration of base model {name} cannot be used",
            tuple(problems),
            "the folder must hold the config.json of a decoder-only model as transformers saves it",
        )
    return sizes, flags


def _read_sizes(keys: ConfigKeys, problems: list[Problem]) -> _Sizes:
    hidden = _read_size(keys, "hidden_size", problems)
    heads = _read_size(keys, "num_attention_heads", problems)
    kv_heads = _read_size(keys, "num_key_value_heads", problems, default=heads)
    if heads % kv_heads:
        problems.append(_problem("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}"))
    if keys.get("head_dim") is None and hidden % heads:
        problems.append(_problem("num_attention_heads", f"{heads} does not divide hidden_size {hidden}"))
    return _Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_read_size(keys, "head_dim", problems, default=hidden // heads),
        intermediate=_read_size(keys, "intermediate_size", problems),
        layers=_read_size(keys, "num_hidden_layers", problems),
        vocab=_read_size(keys, "vocab_size", problems),
        max_positions=_read_size(keys, "max_position_embeddings", problems),
    )


def _problem(key: str, what: str) -> Problem:
    return Problem(where=key, what=what)


def _read_size(keys: ConfigKeys, key: str, problems: list[Problem], default: int | None = None) -> int:
    """Return a positive integer. A wrong value is added to `problems` and read as 1, so that all are reported."""
    value = keys.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        problems.append(_problem(key, "is missing"))
    elif isinstance(value, bool) or not isinstance(value, int):
        problems.append(_problem(key, f"must be a whole number, not {json.dumps(value, default=repr)[:60]}"))
    elif not 1 <= value <= _MAX_SIZE:
        problems.append(_problem(key, f"must be between 1 and {_MAX_SIZE}, not {value}"))
    else:
        return value
    return 1


def _read_flag(keys: ConfigKeys, key: str, problems: list[Problem]) -> bool:
    value = keys.get(key, False)
    if not isinstance(value, bool):
        problems.append(_problem(key, f"must be true or false, not {json.dumps(value, default=repr)[:60]}"))
    return value is True


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OTHER_TOWERS = ("vision_config", "audio_config", "speech_config")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "Gemma3ForConditionalGeneration")
_LIKE_LAYERS = frozenset({"full_attention", "sliding_attention"})


def _check_supported(config: ConfigKeys, name: str) -> None:
    problems = tuple(problem for check in _CHECKS if (problem := check(config)))
    if problems:
        raise InputError(
            f"the base model {name} is of a kind that is not supported",
            problems,
            "name a dense decoder-only language model, such as Qwen/Qwen3-0.6B",
        )


def _check_model_type(config: ConfigKeys) -> Problem | None:
    value = config.get("model_type")
    if isinstance(value, str) and value:
        return None
    return _problem("model_type", "is missing" if value is None else f"must be a name, not {value!r}")


def _check_dense(config: ConfigKeys) -> Problem | None:
    """Refuse mixture-of-experts models: estimates assume identical layers with every parameter active."""
    text = config.get("text_config")
    for keys in (config, text if isinstance(text, Mapping) else {}):
        for key in _EXPERT_KEYS:
            count = keys.get(key)
            if isinstance(count, int) and count > 1:
                reason = "all layers must be alike, and every parameter is counted as active"
                return _problem(key, f"{count}: mixture-of-experts bases are not supported ({reason})")
    return None


def _check_decoder(config: ConfigKeys) -> Problem | None:
    if config.get("is_encoder_decoder") is True:
        return _problem(
            "is_encoder_decoder", "encoder-decoder models are not supported: experts train on a decoder alone"
        )
    return None


def _check_text(config: ConfigKeys) -> Problem | None:
    towers = [key for key in _OTHER_TOWERS if config.get(key)]
    if towers and config.get("model_type") != "gemma3":
        return _problem(towers[0], "models of images or sound are not supported: experts train on text")
    return None


def _check_head(config: ConfigKeys) -> Problem | None:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or any(str(name).endswith(_LANGUAGE_MODELS) for name in names):
        return None
    return _problem("architectures", f"{', '.join(map(str, names))} is not a causal language model")


def _check_layers(config: ConfigKeys) -> Problem | None:
    kinds = config.get("layer_types")
    unlike = sorted({str(kind) for kind in kinds} - _LIKE_LAYERS) if isinstance(kinds, list) else []
    if unlike:
        return _problem("layer_types", f"{', '.join(unlike)}: all layers must be attention layers of the same build")
    return None


_CHECKS = (_check_model_type, _check_dense, _check_decoder, _check_text, _check_head, _check_layers)


def load_shape(name: str, search: Sequence[Path]) -> ModelShape:
    """Return the shape of a base model: from a folder, `search`, the Hugging Face cache or the catalogue."""
    if path := find_config(name, search):
        return make_shape(load_config(path), name, "config")
    if keys := lookup_base(name):
        return make_shape(keys, name, "catalogue")
    raise _not_found(name, search)


def _not_found(name: str, search: Sequence[Path]) -> InputError:
    folders = ", ".join(str(folder / get_last_component(name)) for folder in search)
    looked = [
        Problem(where="folder", what=f"{name} has no config.json"),
        *([Problem(where="folders", what=f"{folders}: no config.json")] if folders else []),
        Problem(where="Hugging Face cache", what=f"{get_hub_cache()}: no such model"),
        Problem(where="catalogue", what="no base model of this name"),
    ]
    close = suggest_bases(name, search)
    suggestion = f"did you mean {' or '.join(close)}? Otherwise " if close else ""
    way_out = "name a local folder that holds the model's config.json (nothing is downloaded to plan)"
    return InputError(f"the base model {name!r} was not found", tuple(looked), suggestion + way_out)
