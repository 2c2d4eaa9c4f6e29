"""How model types of transformers build a decoder layer: the linear layers with their sizes and biases, and norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.core.frozen_model import Frozen

Bias = bool | str  # whatever the config says, or the config's key that decides


class Linear(Frozen):
    """One linear layer of a decoder layer, by the name that adapters target."""

    name: str
    in_features: int
    out_features: int
    has_bias: bool = False

    @property
    def num_parameters(self) -> int:
        return self.in_features * self.out_features + (self.out_features if self.has_bias else 0)


class Experts(Frozen):
    """The routed experts of a decoder layer, whose weights transformers stores in stacked tensors."""

    num_experts: int
    num_active: int  # per token
    hidden_size: int
    intermediate_size: int  # of one expert
    has_bias: bool  # of experts and router
    path: str  # inside a decoder layer

    @property
    def num_parameters(self) -> int:
        """Count the parameters of all experts and of the router."""
        hidden, inner = self.hidden_size, self.intermediate_size
        biases = 2 * inner + hidden + 1 if self.has_bias else 0
        return self.num_experts * (3 * hidden * inner + hidden + biases)

    @property
    def active_weights(self) -> int:
        """Return the number of parameters that are active for a token: its experts' and the router's."""
        return 3 * self.num_active * self.hidden_size * self.intermediate_size + self.num_experts * self.hidden_size

    @property
    def stacks(self) -> dict[str, Linear]:
        """Return the matrices of one expert, by the names that `target_parameters` uses for the stacked weights."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            f"{self.path}.gate_up_proj": Linear(name="gate_up_proj", in_features=hidden, out_features=2 * inner),
            f"{self.path}.down_proj": Linear(name="down_proj", in_features=inner, out_features=hidden),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertKeys:
    """Where a model has its experts: the config key of their width, their module path, and whether they have biases."""

    width: str = "intermediate_size"
    has_bias: bool = False
    path: str = "mlp.experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Model sizes in a config.json, such as hidden size, layers, heads and vocabulary."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How transformers builds a decoder layer of a model type, and the defaults of its config class."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: fused
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two names: not gated, or gate_up_proj
    qkv_bias: Bias = False
    output_bias: Bias = False
    mlp_bias: Bias = False
    norms_per_layer: int = 2
    has_norm_bias: bool = False  # LayerNorm instead of RMSNorm
    qk_norm: Literal["", "head", "full"] = ""  # one weight per feature of a head, or of all heads
    qk_norm_key: str = ""  # the config's key that switches it on
    parameters_per_layer: int = 0  # apart from linear layers and norms
    output_from_hidden: bool = False  # the output projection has hidden_size inputs, whatever the heads have
    has_head_bias: bool = False
    embeddings: tuple[str, str] = ("embed_tokens", "lm_head")  # names of the embeddings and of the LM head
    experts: ExpertKeys | None = None  # instead of the MLP
    has_sinks: bool = False  # a learned score per head that takes part in the softmax of attention
    defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_gated(self) -> bool:
        """Return whether the MLP is gated."""
        return len(self.mlp) != 2 or self.mlp[0] == "gate_up_proj"

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the boolean config keys that decide which biases and norms a layer has."""
        keys = (self.qkv_bias, self.output_bias, self.mlp_bias, self.qk_norm_key or False)
        return tuple(dict.fromkeys(key for key in keys if isinstance(key, str)))


_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_ATTENTION_BIAS = Family(qkv_bias="attention_bias", output_bias="attention_bias")
LLAMA = replace(_ATTENTION_BIAS, mlp_bias="mlp_bias", defaults={"max_position_embeddings": 2048})
_GLM = Family(
    mlp=("gate_up_proj", "down_proj"),
    qkv_bias="attention_bias",
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072},
)
_COHERE = replace(
    _ATTENTION_BIAS, norms_per_layer=1, defaults={"tie_word_embeddings": True, "max_position_embeddings": 8192}
)
_OLMO2 = replace(_ATTENTION_BIAS, qk_norm="full", defaults={"max_position_embeddings": 2048})

# Defaults of the config classes of transformers 5.22. Essential sizes have none, so that a broken file is reported;
# Gemma 3 is the exception, because its published files omit them.
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072}),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768}),
    "qwen3": replace(
        _ATTENTION_BIAS,
        qk_norm="head",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    ),
    "phi3": Family(qkv=("qkv_proj",), mlp=("gate_up_proj", "down_proj"), defaults={"max_position_embeddings": 4096}),
    "phi": Family(
        output="dense",
        mlp=("fc1", "fc2"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norms_per_layer=1,
        has_norm_bias=True,
        qk_norm="head",
        qk_norm_key="qk_layernorm",
        has_head_bias=True,
        defaults={"max_position_embeddings": 2048},
    ),
    "gemma": replace(
        _ATTENTION_BIAS,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    ),
    "gemma2": replace(
        _ATTENTION_BIAS,
        norms_per_layer=4,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 8192},
    ),
    "gemma3_text": replace(
        _ATTENTION_BIAS,
        norms_per_layer=4,
        qk_norm="head",
        defaults={
            **_GEMMA_DEFAULTS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
    ),
    "smollm3": replace(
        LLAMA,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
    "granite": LLAMA,
    "arcee": replace(LLAMA, mlp=("up_proj", "down_proj"), defaults={"max_position_embeddings": 4096}),
    "olmo": replace(_ATTENTION_BIAS, norms_per_layer=0, defaults={"max_position_embeddings": 2048}),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "cohere": replace(_COHERE, qk_norm="full", qk_norm_key="use_qk_norm"),
    "cohere2": _COHERE,
    "exaone4": Family(qk_norm="head", defaults={"num_key_value_heads": 32, "max_position_embeddings": 2048}),
    "starcoder2": Family(
        mlp=("c_fc", "c_proj"),
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        has_norm_bias=True,
        defaults={
            "use_bias": True,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norms_per_layer=4),
    "apertus": replace(
        _ATTENTION_BIAS,
        mlp=("up_proj", "down_proj"),
        qk_norm="head",
        parameters_per_layer=2,
        defaults={"max_position_embeddings": 65536},
    ),
    "seed_oss": Family(
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={
            "attention_bias": True,
            "attention_dropout": 0.1,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 524288,
        },
    ),
    "helium": Family(
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
        output_from_hidden=True,
        defaults={"head_dim": 128, "num_key_value_heads": 20, "max_position_embeddings": 4096},
    ),
    "gpt_neox": Family(
        qkv=("query_key_value",),
        output="dense",
        mlp=("dense_h_to_4h", "dense_4h_to_h"),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=True,
        has_norm_bias=True,
        embeddings=("embed_in", "lm_head"),
        defaults={"attention_bias": True, "max_position_embeddings": 2048},
    ),
    "qwen3_moe": replace(
        _ATTENTION_BIAS,
        mlp=(),
        qk_norm="head",
        experts=ExpertKeys(width="moe_intermediate_size"),
        defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8, "max_position_embeddings": 32768},
    ),
    "gpt_oss": replace(
        _ATTENTION_BIAS,
        mlp=(),
        experts=ExpertKeys(has_bias=True),
        has_sinks=True,
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "mixtral": Family(
        mlp=(),
        experts=ExpertKeys(),
        defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131072},
    ),
    "olmoe": replace(
        _ATTENTION_BIAS,
        mlp=(),
        qk_norm="full",
        experts=ExpertKeys(),
        defaults={"num_experts_per_tok": 8, "max_position_embeddings": 4096},
    ),
    "granitemoe": replace(
        _ATTENTION_BIAS,
        mlp=(),
        experts=ExpertKeys(path="block_sparse_moe.experts"),
        defaults={"num_experts_per_tok": 2, "max_position_embeddings": 2048},
    ),
}

_NO_BOUNDARIES = "transformers does not pass document boundaries to its attention"
_NO_LAYERS = "its decoder has no `layers`"
# Model types that cannot be trained, found by trying them with transformers 5.22.
UNTRAINABLE: Mapping[str, str] = {
    "recurrent_gemma": "its recurrent layers see earlier documents of a pack",
    "stablelm": _NO_BOUNDARIES,
    "nemotron": _NO_BOUNDARIES,
    "doge": "its attention selects tokens by their values, for which our attention has no option",
    "gpt_neox_japanese": "packed documents give different results from separate ones",
    **dict.fromkeys(
        ("bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt"),
        "its layers are not built like Llama's, and its config has other keys",
    ),
    "cpmant": _NO_LAYERS,
    "falcon": _NO_LAYERS,
    "hrm_text": _NO_LAYERS,
    "hunyuan_v1_moe": "its experts are not counted correctly",
    "modernbert-decoder": "its linear layers are not found in its decoder",
    **dict.fromkeys(("emu3_text_model", "mllama_text_model"), "transformers has no causal language model for it"),
    "bert": _NO_LAYERS,
    "big_bird": _NO_LAYERS,
}


def make_linears(sizes: Sizes, family: Family, flags: Mapping[str, bool]) -> tuple[Linear, ...]:
    """Return the linear layers of a decoder layer."""
    query, key_value = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    outputs = (query, key_value, key_value) if len(family.qkv) == 3 else (query + 2 * key_value,)
    inner, down = family.mlp[:-1], family.mlp[-1:]
    width = sizes.intermediate * (2 if inner[:1] == ("gate_up_proj",) else 1)
    qkv_bias, output_bias, mlp_bias = (
        flags[bias] if isinstance(bias, str) else bias
        for bias in (family.qkv_bias, family.output_bias, family.mlp_bias)
    )
    output_inputs = sizes.hidden if family.output_from_hidden else query
    layers = (
        *((name, sizes.hidden, width, qkv_bias) for name, width in zip(family.qkv, outputs, strict=True)),
        (family.output, output_inputs, sizes.hidden, output_bias),
        *((name, sizes.hidden, width, mlp_bias) for name in inner),
        *((name, sizes.intermediate, sizes.hidden, mlp_bias) for name in down),
    )
    return tuple(Linear(name=name, in_features=i, out_features=o, has_bias=bias) for name, i, o, bias in layers)


def count_norms(sizes: Sizes, family: Family, flags: Mapping[str, bool]) -> int:
    """Count the parameters of a decoder layer outside its linear layers, such as norms."""
    per_feature = 2 if family.has_norm_bias else 1
    count = family.norms_per_layer * sizes.hidden * per_feature + family.parameters_per_layer
    count += sizes.heads if family.has_sinks else 0
    if not family.qk_norm or (family.qk_norm_key and not flags[family.qk_norm_key]):
        return count
    num_heads = 2 if family.qk_norm == "head" else sizes.heads + sizes.kv_heads
    return count + num_heads * sizes.head_dim * per_feature
