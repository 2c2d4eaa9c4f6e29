"""Decoder layers whose attention block and MLP block run as fused ops, for the model families in FUSED_FAMILIES.

Other families keep their own code around fused LoRA layers (linear.py).

How a layer is patched: `fuse_decoder_layers` sets the `__class__` of the attention and MLP modules to a subclass of
(a mixin below, the module's own class). The module object, its children and its parameters stay, so state dicts, hooks
and PEFT see what they know, and super().forward is the family's own code. That code is used whenever the fused op does
not apply: with a KV cache, with a disabled or merged adapter, or inside use_reference_forward(). The RMSNorm before
each block becomes the identity (_DeferredNorm), because the fused op applies it. There is one class per family, so
that one compiled graph serves all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from launcher.training.kernels.fused_layer_autograd import DropoutSeeds, FusedMLP, FusedOutProj, FusedQKV
from launcher.training.kernels.seeded_dropout import draw_seeds
from launcher.training.model.fused_lora.dora import apply_magnitude
from launcher.training.model.fused_lora.linear import FusedLoraLinear
from launcher.training.model.fused_lora.reference import is_reference_forward
from launcher.training.model.fused_lora.weights import ADAPTER_NAME, FusedLoraWeights
from launcher.training.model.known_blocks import (
    LAYERS,
    AttentionBlock,
    add_mixin,
    concat_biases,
    find_gelu,
    find_score_options,
    get_norm_eps,
    get_norm_weight,
    is_attention,
    is_norm,
    list_gates,
)


def _draw_dropout_seeds(weights: FusedLoraWeights, count: int, device: torch.device) -> DropoutSeeds:
    """Draw `count` dropout seeds, one per input of LoRA layers; return no seeds if dropout is off."""
    if not weights.dropout or not weights.first_adapted.training:
        return DropoutSeeds(None, 0.0)
    return DropoutSeeds(draw_seeds(weights.first_adapted.lora_dropout[ADAPTER_NAME], count, device), weights.dropout)


def _get_active_weights(module: Any) -> FusedLoraWeights | None:
    """Return a layer's fused weight; None in use_reference_forward, or if its adapter is disabled, merged or gone."""
    if is_reference_forward() or not isinstance(module, FusedLoraLinear):
        return None
    lora: Any = module
    return None if lora.disable_adapters or lora.merged else module.fused_weights


def _finish_output(weights: FusedLoraWeights, y: Tensor, correction: Tensor) -> Tensor:
    """Apply DoRA's magnitude to the output of a block's last projection."""
    if weights.dora is None:
        return y
    has_correction = correction.numel() > 0
    return apply_magnitude(y, weights.first_adapted, weights.dora.row_norms, correction if has_correction else None)


class _DeferredNorm(nn.Module):
    """Mixin that makes an RMSNorm the identity, because the fused block after it applies the norm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def family_forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = super().forward(hidden_states)
        return result


class _FusedBlock(nn.Module):
    """Base of the mixins that run an attention or MLP module, and the RMSNorm before it, as fused ops."""

    preceding_norm: tuple[_DeferredNorm]  # in a tuple, so that it remains a child of the layer only
    adapted_names: tuple[str, ...]  # of one adapted layer per fused weight

    def _get_active_weights(self) -> list[FusedLoraWeights] | None:
        all_weights = [_get_active_weights(getattr(self, name)) for name in self.adapted_names]
        active = [weights for weights in all_weights if weights is not None]
        return active if len(active) == len(all_weights) else None


class FusedMLPBlock(_FusedBlock):
    """Mixin that runs an MLP module and the RMSNorm before it as one op."""

    is_gelu: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output."""
        active = self._get_active_weights()
        if active is None:
            result: Tensor = super().forward(self.preceding_norm[0].family_forward(x))
            return result
        gate_up, down = active
        norm: Any = self.preceding_norm[0]
        with torch.autocast(x.device.type, enabled=False):
            y, correction = FusedMLP.apply(
                x.flatten(0, -2),
                gate_up.dora_scale(),
                get_norm_weight(norm),
                _draw_dropout_seeds(gate_up, 2, x.device),
                get_norm_eps(norm),
                (gate_up.stored, down.stored),
                (gate_up.shape, down.shape),
                self.is_gelu,
                *gate_up.lora_parameters(),
                *down.lora_parameters(),
            )
            output = _finish_output(down, y, correction)
        return output.unflatten(0, x.shape[:-1])


class FusedAttentionBlock(_FusedBlock, AttentionBlock):
    """Mixin that runs the projections of an attention module, and the RMSNorm before it, as one op."""

    def _prepare_family_input(self, hidden_states: Tensor) -> Tensor:
        return self.preceding_norm[0].family_forward(hidden_states)

    def _compute_heads(self, hidden_states: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        active = self._get_active_weights()
        if active is None:
            return None
        (weights,), attention = active, cast(Any, self)
        head_dim = attention.head_dim
        norm: Any = self.preceding_norm[0]
        has_qk_norm = hasattr(attention, "q_norm")
        out_features = weights.shape.out_features
        with torch.autocast(hidden_states.device.type, enabled=False):
            result: tuple[Tensor, ...] = FusedQKV.apply(
                hidden_states.flatten(0, -2),
                weights.dora_scale(),
                get_norm_weight(norm),
                weights.stored,
                tuple(get_norm_weight(one) for one in (attention.q_norm, attention.k_norm))
                if has_qk_norm
                else (None, None),
                cos_sin,
                _draw_dropout_seeds(weights, 1, hidden_states.device),
                get_norm_eps(norm),
                (out_features[0] // head_dim, out_features[1] // head_dim),
                weights.shape,
                concat_biases([member.base_layer for member in weights.members]),
                *weights.lora_parameters(),
            )
        return result

    def _project_output(self, x: Tensor) -> Tensor:
        """Apply o_proj with the fused op if it has dropout; otherwise FusedLoraLinear.forward is equally fast."""
        attention: Any = self
        weights = _get_active_weights(attention.o_proj)
        has_bias = weights is not None and weights.first_adapted.base_layer.bias is not None
        seeds, rate = (None, 0.0) if weights is None or has_bias else _draw_dropout_seeds(weights, 1, x.device)
        if weights is None or seeds is None:
            plain: Tensor = attention.o_proj(x)
            return plain
        with torch.autocast(x.device.type, enabled=False):
            flat = x.flatten(0, -2).to(weights.dtype)
            is_dora = weights.dora is not None
            y, correction = FusedOutProj.apply(
                flat, (seeds, rate), weights.stored, weights.shape, is_dora, *weights.lora_parameters()
            )
            output = _finish_output(weights, y, correction)
        return output.unflatten(0, x.shape[:-1])


def _list_fused_layers(block: Any, mixin: Any) -> tuple[tuple[str, ...], ...]:
    """Return the layer names of each fused weight that a block needs, such as (gate_proj, up_proj) and (down_proj)."""
    if mixin is FusedAttentionBlock:
        return (("q_proj", "k_proj", "v_proj"),)
    return (list_gates(block), ("down_proj",))


def list_fusable_blocks(layers: list[nn.Module]) -> list[nn.Module]:
    """Return the attention and MLP modules that can be fused if layers without an adapter join fused weights.

    Call before fuse_lora_layers, which takes the result as `include_plain`.
    """
    return [block for layer in layers for mixin, block, _ in _list_known_blocks(layer) if _has_adapters(block, mixin)]


def fuse_decoder_layers(layers: list[nn.Module]) -> int:
    """Replace attention and MLP blocks with fused ops; return how many. Call after fuse_lora_layers."""
    count = 0
    for layer in layers:
        for mixin, block, norm in _list_known_blocks(layer):
            adapted_names = _match_fused_weights(block, mixin)
            if adapted_names is not None:
                if mixin is FusedMLPBlock:
                    block.is_gelu = find_gelu(block)
                else:
                    block.score_options = find_score_options(block)
                    block.has_rope = bool(getattr(block, "use_rope", True))  # SmolLM3 rotates in some layers only
                block.__class__ = add_mixin(mixin, block.__class__)
                norm.__class__ = add_mixin(_DeferredNorm, norm.__class__)
                block.preceding_norm, block.adapted_names = (norm,), adapted_names
                count += 1
    return count


def _list_known_blocks(layer: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (mixin, module, RMSNorm before it) of a layer's attention and MLP modules that fused ops support."""
    if type(layer).__name__ not in LAYERS:
        return
    decoder: Any = layer
    if _is_frozen_attention(decoder.self_attn) and _is_frozen_norm(decoder.input_layernorm):
        yield FusedAttentionBlock, decoder.self_attn, decoder.input_layernorm
    # Gemma 2 and 3 have a norm after each block, too; post_attention_layernorm is one of them.
    mlp_norm = getattr(decoder, "pre_feedforward_layernorm", decoder.post_attention_layernorm)
    if find_gelu(decoder.mlp) is not None and _is_frozen_norm(mlp_norm):
        yield FusedMLPBlock, decoder.mlp, mlp_norm


def _has_adapters(block: Any, mixin: Any) -> bool:
    """Return whether each fused weight of a block would have an adapter, and fused ops can add all of its biases."""
    for names in _list_fused_layers(block, mixin):
        members = [getattr(block, name) for name in names]
        bases = [getattr(member, "base_layer", member) for member in members]
        biases = [base.bias for base in bases if base.bias is not None]
        is_dora = any(getattr(member, "lora_variant", None) for member in members)
        can_add = mixin is FusedAttentionBlock and not is_dora and not any(bias.requires_grad for bias in biases)
        if bases == members or (biases and not can_add):
            return False
    return True


def _match_fused_weights(block: Any, mixin: Any) -> tuple[str, ...] | None:
    """Return the name of one LoRA layer for each fused weight of a block, such as q_proj for q, k and v.

    None if the fused weights do not hold exactly the block's layers, or differ in storage, dropout or DoRA.
    """
    if not _has_adapters(block, mixin):
        return None
    adapted_names = []
    for names in _list_fused_layers(block, mixin):
        bases = [getattr(getattr(block, name), "base_layer", getattr(block, name)) for name in names]
        fused = [name for name in names if isinstance(getattr(block, name), FusedLoraLinear)]
        if not fused or [one.base_layer for one in getattr(block, fused[0]).fused_weights.members] != bases:
            return None
        adapted_names.append(fused[0])
    all_weights: list[FusedLoraWeights] = [getattr(block, name).fused_weights for name in adapted_names]
    kinds = {(len(weights.stored), weights.dropout, weights.dora is None) for weights in all_weights}
    return tuple(adapted_names) if len(kinds) == 1 else None


def _is_frozen_norm(module: Any) -> bool:
    return is_norm(module) and not module.weight.requires_grad


def _is_frozen_attention(module: Any) -> bool:
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    return is_attention(module) and all(map(_is_frozen_norm, norms))
