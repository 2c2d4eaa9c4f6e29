"""The two halves of a decoder layer as one operation each (halves.py), for families whose layers were read.

Others keep their own code around our products (products.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.memory import JOINED_FAMILIES, JOINED_HEADS
from launcher.training.dropping import draw_seeds
from launcher.training.halves import BlockShape, Heads, Mlp, Seeds
from launcher.training.products import Block, ProductLinear, is_by_the_library, normalise

_FAMILIES = tuple(family.capitalize() for family in JOINED_FAMILIES)
_LAYERS = tuple(f"{family}DecoderLayer" for family in _FAMILIES)
_MLPS = tuple(f"{family}MLP" for family in _FAMILIES)
_NORMS = tuple(f"{family}RMSNorm" for family in _FAMILIES)
_ATTENTIONS = tuple(f"{family.capitalize()}Attention" for family in JOINED_HEADS)
_HEAD_SIZES = (32, 64, 128, 256)  # a power of two: what Triton counts in


def _is_usable(member: Any) -> bool:
    """Not behind `merge_and_unload`, which puts plain matrices in its place."""
    is_adapted = isinstance(member, ProductLinear) and not (member.disable_adapters or member.merged)
    return is_adapted and not is_by_the_library()


def _shape_of(block: Block) -> BlockShape:
    return block.sizes, block.scale, block.rank


def _draw(block: Block, count: int, device: torch.device) -> Seeds:
    """For each input of a half that LoRA's dropout takes from."""
    member = block.members[0]
    if not block.dropout or not member.training:
        return None, 0.0
    return draw_seeds(member.lora_dropout["default"], count, device), block.dropout


class _Deferred(nn.Module):
    """A norm that is left to the half of the layer behind it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def by_the_family(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = super().forward(hidden_states)
        return result


class _Half(nn.Module):
    """Comes before a family's class in the order of inheritance. The norm before it is its own to apply."""

    launcher_norm: tuple[_Deferred]  # in a tuple: it stays a part of the layer


class _JoinedMlp(_Half):
    def forward(self, x: Tensor) -> Tensor:
        mlp: Any = self
        if not _is_usable(mlp.gate_proj):
            result: Tensor = super().forward(self.launcher_norm[0].by_the_family(x))
            return result
        gates, down = mlp.gate_proj.launcher_block, mlp.down_proj.launcher_block
        before: Any = self.launcher_norm[0]
        with torch.autocast(x.device.type, enabled=False):
            y, rest = Mlp.apply(
                x.flatten(0, -2),
                gates.scales(),
                before.weight,
                _draw(gates, 2, x.device),
                before.variance_epsilon,
                (gates.matrix, down.matrix),
                (_shape_of(gates), _shape_of(down)),
                *gates.adapters(),
                *down.adapters(),
            )
            if down.lengths is not None:
                y = normalise(y, down.members[0], down.lengths.of_rows)
            if rest.numel():
                y = y + rest
        answer: Tensor = y.unflatten(0, x.shape[:-1])
        return answer


class _JoinedAttention(_Half):
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        attention: Any = self
        kernel = attention.config._attn_implementation
        is_known = kernel in ALL_ATTENTION_FUNCTIONS and position_embeddings[0].shape[-1] == attention.head_dim
        if past_key_values is not None or not is_known or not _is_usable(attention.q_proj):
            normed = self.launcher_norm[0].by_the_family(hidden_states)
            result: tuple[Tensor, Tensor | None] = super().forward(
                normed, position_embeddings, attention_mask, past_key_values, **more
            )
            return result
        query, key, value = self._make_heads(hidden_states, position_embeddings)
        if hasattr(attention, "sliding_window"):
            more["sliding_window"] = attention.sliding_window
        attend = ALL_ATTENTION_FUNCTIONS[kernel]
        out, weights = attend(self, query, key, value, attention_mask, scaling=attention.scaling, **more)
        projected: Tensor = attention.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous())
        return projected, weights

    def _make_heads(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        attention: Any = self
        shape, size = hidden_states.shape[:-1], attention.head_dim
        block = attention.q_proj.launcher_block
        before: Any = self.launcher_norm[0]
        norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
        with torch.autocast(hidden_states.device.type, enabled=False):
            heads = Heads.apply(
                hidden_states.flatten(0, -2),
                block.scales(),
                before.weight,
                block.matrix,
                norms,
                tuple(angle.expand(*shape, size).reshape(-1, size) for angle in angles),
                _draw(block, 1, hidden_states.device),
                before.variance_epsilon,
                (block.sizes[0] // size, block.sizes[1] // size),
                _shape_of(block),
                *block.adapters(),
            )
        return (states.unflatten(0, shape).transpose(1, 2) for states in heads)


@cache
def _mix(first: Any, second: Any) -> Any:
    """One class for all modules of a family: one compiled graph then serves all layers."""
    return type(f"{first.__name__.strip('_')}{second.__name__}", (first, second), {})


def join_layers(layers: list[nn.Module]) -> int:
    """Behind lay_out_products. How many halves of layers are one operation now."""
    count = 0
    for layer in layers:
        if type(layer).__name__ not in _LAYERS:
            continue
        decoder: Any = layer
        halves = (
            (_JoinedAttention, decoder.self_attn, decoder.input_layernorm, _is_attention),
            (_JoinedMlp, decoder.mlp, decoder.post_attention_layernorm, _is_mlp),
        )
        for joined, half, before, is_joinable in halves:
            if is_joinable(half) and _is_norm(before):
                half_kind, norm_kind = half.__class__, before.__class__
                half.__class__ = _mix(joined, half_kind)
                before.__class__ = _mix(_Deferred, norm_kind)
                half.launcher_norm = (before,)
                count += 1
    return count


def _is_norm(module: Any) -> bool:
    return type(module).__name__ in _NORMS and not module.weight.requires_grad


def _is_mlp(module: Any) -> bool:
    if type(module).__name__ not in _MLPS or module.config.hidden_act != "silu":
        return False
    if not _is_block(module, "gate_proj", "up_proj") or not _is_block(module, "down_proj"):
        return False
    gates, down = module.gate_proj.launcher_block, module.down_proj.launcher_block
    return gates.dropout == down.dropout and (gates.lengths is None) == (down.lengths is None)


def _is_attention(module: Any) -> bool:
    if type(module).__name__ not in _ATTENTIONS or module.head_dim not in _HEAD_SIZES:
        return False
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    if not all(_is_norm(one) and one.variance_epsilon == module.config.rms_norm_eps for one in norms):
        return False
    return _is_block(module, "q_proj", "k_proj", "v_proj")


def _is_block(parent: Any, *names: str) -> bool:
    """These matrices and no others lie in one block, without bias."""
    members = [getattr(parent, name) for name in names]
    if not all(isinstance(member, ProductLinear) for member in members):
        return False
    block = members[0].launcher_block
    return block.members == members and all(one.base_layer.bias is None for one in members)
