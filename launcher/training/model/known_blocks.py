"""The attention and MLP modules of transformers that fused blocks replace, and what they read from them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from launcher.plan.estimate.memory.recipe import FUSED_FAMILIES, FUSED_HEAD_DIMS, FUSED_QKV_FAMILIES

LAYERS = tuple(f"{prefix}DecoderLayer" for prefix in FUSED_FAMILIES.values())
_MLPS = tuple(f"{prefix}MLP" for prefix in FUSED_FAMILIES.values())
_NORMS = tuple(f"{prefix}RMSNorm" for prefix in FUSED_FAMILIES.values())
_ATTENTIONS = tuple(f"{FUSED_FAMILIES[family]}Attention" for family in FUSED_QKV_FAMILIES)
_IS_GELU = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True}  # by class of the activation


def is_norm(module: Any) -> bool:
    """Return whether this is a known RMSNorm."""
    return type(module).__name__ in _NORMS


def is_attention(module: Any) -> bool:
    """Return whether this is a known attention module, with a supported head size and known QK-norms, if any."""
    if type(module).__name__ not in _ATTENTIONS or module.head_dim not in FUSED_HEAD_DIMS:
        return False
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    return all(is_norm(norm) and get_norm_eps(norm) == module.config.rms_norm_eps for norm in norms)


def list_gates(mlp: Any) -> tuple[str, ...]:
    """Return the names of the layers before an MLP's gated activation."""
    return ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")


def get_norm_weight(norm: Any) -> Tensor:
    """Return the factor that an RMSNorm multiplies by: its weight, or 1 + weight for Gemma."""
    weight: Tensor = norm.weight
    return 1.0 + weight.float() if "Gemma" in type(norm).__name__ else weight


def get_norm_eps(norm: Any) -> float:
    """Return the epsilon of an RMSNorm."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def find_gelu(module: Any) -> bool | None:
    """Return whether the MLP's activation is GELU by tanh rather than SiLU; None for other MLPs and activations."""
    if type(module).__name__ not in _MLPS:
        return None
    activation = module.activation_fn if hasattr(module, "activation_fn") else module.act_fn
    return _IS_GELU.get(type(activation).__name__)


def find_score_options(attention: Any) -> dict[str, Any]:
    """Return the options that the family's own forward passes to its attention function."""
    if type(attention).__name__ == "MistralAttention":
        return {"sliding_window": getattr(attention.config, "sliding_window", None)}
    options = {"sliding_window": attention.sliding_window} if hasattr(attention, "sliding_window") else {}
    if type(attention).__name__ == "Gemma2Attention":
        options["softcap"] = attention.attn_logit_softcapping
    return options
