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
from launcher.training.blocks import Block
from launcher.training.dropping import draw_seeds
from launcher.training.halves import BlockShape, Heads, Last, Mlp, Seeds
from launcher.training.products import ProductLinear, is_by_the_library
from launcher.training.scaling import normalise

_FAMILIES = tuple(family.capitalize() for family in JOINED_FAMILIES)
_LAYERS = tuple(f"{family}DecoderLayer" for family in _FAMILIES)
_MLPS = tuple(f"{family}MLP" for family in _FAMILIES)
_NORMS = tuple(f"{family}RMSNorm" for family in _FAMILIES)
_ATTENTIONS = tuple(f"{family.capitalize()}Attention" for family in JOINED_HEADS)
_HEAD_SIZES = (32, 64, 128, 256)  # a power of two: what Triton counts in


def _shape_of(block: Block) -> BlockShape:
    return block.sizes, block.adapted, block.scale, block.rank


def _draw(block: Block, count: int, device: torch.device) -> Seeds:
    """For each input of a half that LoRA's dropout takes from."""
    if not block.dropout or not block.lead.training:
        return None, 0.0
    return draw_seeds(block.lead.lora_dropout["default"], count, device), block.dropout


def _find_block(module: Any) -> Block | None:
    """None: its adapter is switched off or merged, or gone: `merge_and_unload` puts plain matrices in their place."""
    if is_by_the_library() or not isinstance(module, ProductLinear):
        return None
    adapted: Any = module
    return None if adapted.disable_adapters or adapted.merged else module.launcher_block


def _finish(block: Block, y: Tensor, rest: Tensor) -> Tensor:
    """What the last matrix of a half gives: DoRA scales it."""
    if block.lengths is None:
        return y
    return normalise(y, block.lead, block.lengths.of_rows, rest if rest.numel() else None)


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
    launcher_leads: tuple[str, ...]  # of each block, the name of an adapted matrix

    def _find_blocks(self) -> list[Block] | None:
        found = [_find_block(getattr(self, name)) for name in self.launcher_leads]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(found) else None


class _JoinedMlp(_Half):
    def forward(self, x: Tensor) -> Tensor:
        blocks = self._find_blocks()
        if blocks is None:
            result: Tensor = super().forward(self.launcher_norm[0].by_the_family(x))
            return result
        gates, down = blocks
        before: Any = self.launcher_norm[0]
        with torch.autocast(x.device.type, enabled=False):
            y, rest = Mlp.apply(
                x.flatten(0, -2),
                gates.scales(),
                before.weight,
                _draw(gates, 2, x.device),
                before.variance_epsilon,
                (gates.stored, down.stored),
                (_shape_of(gates), _shape_of(down)),
                *gates.adapters(),
                *down.adapters(),
            )
            answer = _finish(down, y, rest)
        return answer.unflatten(0, x.shape[:-1])


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
        blocks = self._find_blocks()
        if past_key_values is not None or not is_known or blocks is None:
            normed = self.launcher_norm[0].by_the_family(hidden_states)
            result: tuple[Tensor, Tensor | None] = super().forward(
                normed, position_embeddings, attention_mask, past_key_values, **more
            )
            return result
        query, key, value = self._make_heads(blocks[0], hidden_states, position_embeddings)
        if hasattr(attention, "sliding_window"):
            more["sliding_window"] = attention.sliding_window
        attend = ALL_ATTENTION_FUNCTIONS[kernel]
        out, weights = attend(self, query, key, value, attention_mask, scaling=attention.scaling, **more)
        return self._project(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _project(self, x: Tensor) -> Tensor:
        attention: Any = self
        block = _find_block(attention.o_proj)
        has_bias = block is not None and block.lead.base_layer.bias is not None
        seeds, rate = (None, 0.0) if block is None or has_bias else _draw(block, 1, x.device)
        if block is None or seeds is None:
            plain: Tensor = attention.o_proj(x)
            return plain
        with torch.autocast(x.device.type, enabled=False):
            flat = x.flatten(0, -2).to(block.dtype)
            splits = block.lengths is not None
            y, rest = Last.apply(flat, (seeds, rate), block.stored, _shape_of(block), splits, *block.adapters())
            answer = _finish(block, y, rest)
        return answer.unflatten(0, x.shape[:-1])

    def _make_heads(self, block: Block, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        attention: Any = self
        shape, size = hidden_states.shape[:-1], attention.head_dim
        before: Any = self.launcher_norm[0]
        norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
        with torch.autocast(hidden_states.device.type, enabled=False):
            heads = Heads.apply(
                hidden_states.flatten(0, -2),
                block.scales(),
                before.weight,
                block.stored,
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


_BLOCKS: dict[Any, tuple[tuple[str, ...], ...]] = {
    _JoinedAttention: (("q_proj", "k_proj", "v_proj"),),
    _JoinedMlp: (("gate_proj", "up_proj"), ("down_proj",)),
}


def find_joinable(layers: list[nn.Module]) -> list[nn.Module]:
    """Before lay_out_products: halves that can be joined if blocks take in what is not adapted."""
    return [half for layer in layers for joined, half, _ in _list_halves(layer) if _are_adapted(half, joined)]


def join_layers(layers: list[nn.Module]) -> int:
    """Behind lay_out_products. How many halves of layers are one operation now."""
    count = 0
    for layer in layers:
        for joined, half, before in _list_halves(layer):
            leads = _find_leads(half, joined)
            if leads is not None:
                half_kind, norm_kind = half.__class__, before.__class__
                half.__class__ = _mix(joined, half_kind)
                before.__class__ = _mix(_Deferred, norm_kind)
                half.launcher_norm, half.launcher_leads = (before,), leads
                count += 1
    return count


def _list_halves(layer: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """With the norm before it, where code and sizes are known."""
    if type(layer).__name__ not in _LAYERS:
        return
    decoder: Any = layer
    if _is_attention(decoder.self_attn) and _is_norm(decoder.input_layernorm):
        yield _JoinedAttention, decoder.self_attn, decoder.input_layernorm
    if _is_mlp(decoder.mlp) and _is_norm(decoder.post_attention_layernorm):
        yield _JoinedMlp, decoder.mlp, decoder.post_attention_layernorm


def _are_adapted(half: Any, joined: Any) -> bool:
    """One at least of each block, which no matrix has a bias in."""
    for names in _BLOCKS[joined]:
        members = [getattr(half, name) for name in names]
        bases = [getattr(member, "base_layer", member) for member in members]
        if bases == members or any(base.bias is not None for base in bases):
            return False
    return True


def _find_leads(half: Any, joined: Any) -> tuple[str, ...] | None:
    """None: not all matrices lie in blocks, these and no others; or their blocks are not alike."""
    if not _are_adapted(half, joined):
        return None
    leads = []
    for names in _BLOCKS[joined]:
        bases = [getattr(getattr(half, name), "base_layer", getattr(half, name)) for name in names]
        own = [name for name in names if isinstance(getattr(half, name), ProductLinear)]
        if not own or [one.base_layer for one in getattr(half, own[0]).launcher_block.members] != bases:
            return None
        leads.append(own[0])
    blocks: list[Block] = [getattr(half, name).launcher_block for name in leads]
    kinds = {(len(block.stored), block.dropout, block.lengths is None) for block in blocks}
    return tuple(leads) if len(kinds) == 1 else None


def _is_norm(module: Any) -> bool:
    return type(module).__name__ in _NORMS and not module.weight.requires_grad


def _is_mlp(module: Any) -> bool:
    return type(module).__name__ in _MLPS and module.config.hidden_act == "silu"


def _is_attention(module: Any) -> bool:
    if type(module).__name__ not in _ATTENTIONS or module.head_dim not in _HEAD_SIZES:
        return False
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    return all(_is_norm(one) and one.variance_epsilon == module.config.rms_norm_eps for one in norms)
