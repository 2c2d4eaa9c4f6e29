"""The attention and MLP modules of transformers that fused blocks replace, and what they read from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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


@cache
def add_mixin(mixin: Any, family_class: Any) -> Any:
    """Return the subclass of (mixin, family_class); there is one, so that one compiled graph serves all layers."""
    return type(f"{mixin.__name__.strip('_')}{family_class.__name__}", (mixin, family_class), {})


def concat_biases(linears: Sequence[Any]) -> Tensor | None:
    """Return the biases of linear layers as one vector, zeros for those without; None if none has one."""
    biased = [linear.bias for linear in linears if linear.bias is not None]
    if not biased:
        return None
    return torch.cat([biased[0].new_zeros(one.out_features) if one.bias is None else one.bias for one in linears])


class AttentionBlock(nn.Module):
    """Base of mixins whose fused op computes queries, keys and values; the family's code runs where it does not."""

    score_options: dict[str, Any]  # what the family passes to its attention function, besides the scaling
    has_rope: bool

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention's output, and its probabilities if the backend computes them."""
        attention: Any = self
        backend, shape = attention.config._attn_implementation, hidden_states.shape[:-1]
        is_supported = backend in ALL_ATTENTION_FUNCTIONS and position_embeddings[0].shape[-1] == attention.head_dim
        heads = None
        if past_key_values is None and is_supported:
            cos, sin = position_embeddings
            if not self.has_rope:
                cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
            size = attention.head_dim
            rotation = cos.expand(*shape, size).reshape(-1, size), sin.expand(*shape, size).reshape(-1, size)
            heads = self._compute_heads(hidden_states, rotation)
        if heads is None:
            result: tuple[Tensor, Tensor | None] = super().forward(
                self._prepare_family_input(hidden_states),
                position_embeddings,
                attention_mask,
                past_key_values,
                **kwargs,
            )
            return result
        query, key, value = (one.unflatten(0, shape).transpose(1, 2) for one in heads)
        attend, kwargs = ALL_ATTENTION_FUNCTIONS[backend], {**kwargs, **self.score_options}
        out, probs = attend(self, query, key, value, attention_mask, scaling=attention.scaling, **kwargs)
        return self._project_output(out.reshape(*shape, -1).contiguous()), probs

    def _compute_heads(self, hidden_states: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        """Return Q, K and V [tokens, heads, head_dim]; None if the fused op does not apply."""
        raise NotImplementedError

    def _prepare_family_input(self, hidden_states: Tensor) -> Tensor:
        """Return what the family's forward gets."""
        return hidden_states

    def _project_output(self, x: Tensor) -> Tensor:
        attention: Any = self
        projected: Tensor = attention.o_proj(x)
        return projected
