"""Attention and MLP modules of known families whose trained FP8 layers run as one op with RoPE or the activation.

The kernels of the activation, of its gradient and of RoPE's gradient write FP8 for the next matmul at once.
`use_fp8_blocks` sets the `__class__` of a module to a subclass of (a mixin below, its own class). The family's own code
still runs with a KV cache, in evaluations and in the reference forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from launcher.training.kernels.elementwise import QKNormRope
from launcher.training.kernels.fp8 import quantize_visibly
from launcher.training.kernels.fp8_trained_ops import mlp, mlp_backward, qkv, qkv_backward
from launcher.training.model.fp8_linear import Fp8Group, TrainedFp8Linear, computes_unrounded
from launcher.training.model.fused_lora.reference import is_reference_forward
from launcher.training.model.known_blocks import (
    LAYERS,
    AttentionBlock,
    add_mixin,
    concat_biases,
    find_gelu,
    find_score_options,
    get_norm_weight,
    is_attention,
    list_gates,
)

_Grads = tuple[Tensor | None, ...]


class _Fp8MLP(torch.autograd.Function):
    """Autograd function from x [tokens, in] and the weights of gate, up (or both in one) and down to the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_gelu: bool, *weights: Tensor) -> Tensor:
        *gates, down = weights
        y, gate_up = mlp(*quantize_visibly(x), gates, down, is_gelu, x.dtype)
        ctx.save_for_backward(x, gate_up, *weights)
        ctx.is_gelu = is_gelu
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> _Grads:
        x, gate_up, *gates, down = ctx.saved_tensors
        x_grad, gates_grad, down_grad = mlp_backward(grads[0].contiguous(), x, gate_up, gates, down, ctx.is_gelu)
        return x_grad, None, *gates_grad.split([len(gate) for gate in gates]), down_grad


class _Fp8QKV(torch.autograd.Function):
    """Autograd function from x [tokens, in] to Q, K, V [tokens, heads, head_dim], with QK-norm and RoPE."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos_sin: tuple[Tensor, Tensor],
        eps: float,
        num_heads: tuple[int, int],  # of queries, of keys and values
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, norms = quantize_visibly(x), (q_norm, k_norm)
        query, key, value, projected = qkv(*rows, list(weights), bias, *norms, *cos_sin, eps, *num_heads, x.dtype)
        if not QKNormRope(None, q_norm, k_norm, *cos_sin, eps).copies_values:
            value = projected[:, -num_heads[1] * query.shape[2] :].unflatten(1, key.shape[1:])
        ctx.save_for_backward(x, projected, bias, q_norm, k_norm, *cos_sin, *weights)
        ctx.eps = eps
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> _Grads:
        x, projected, bias, q_norm, k_norm, cos, sin, *weights = ctx.saved_tensors
        needs_input_grad = ctx.needs_input_grad[0]
        x_grad, weights_grad, bias_grad, norm_grads = qkv_backward(
            *(grad.contiguous() for grad in grads),
            *(x, projected, weights, q_norm, k_norm, cos, sin, ctx.eps, bias is not None, needs_input_grad),
        )
        return (
            x_grad if needs_input_grad else None,
            None if bias is None else bias_grad.to(bias.dtype),
            *((None, None) if q_norm is None else (norm_grads[0].to(q_norm.dtype), norm_grads[1].to(k_norm.dtype))),
            *(None, None, None),
            *weights_grad.split([len(weight) for weight in weights]),
        )


class Fp8MLPBlock(nn.Module):
    """Mixin that runs an MLP module as one op."""

    fp8_gates: Fp8Group
    is_gelu: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output."""
        if is_reference_forward() or computes_unrounded():
            result: Tensor = super().forward(x)
            return result
        block: Any = self
        with torch.autocast(x.device.type, enabled=False):
            flat = x.flatten(0, -2).to(self.fp8_gates.compute_dtype)
            y: Tensor = _Fp8MLP.apply(flat, self.is_gelu, *self.fp8_gates.weights, block.down_proj.weight)
        return y.unflatten(0, x.shape[:-1])


class Fp8AttentionBlock(AttentionBlock):
    """Mixin that runs the projections of an attention module with QK-norm and RoPE as one op."""

    fp8_projections: Fp8Group

    def _compute_heads(self, hidden_states: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        if is_reference_forward() or computes_unrounded():
            return None
        attention: Any = self
        group = self.fp8_projections
        norms = [get_norm_weight(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        with torch.autocast(hidden_states.device.type, enabled=False):
            result: tuple[Tensor, ...] = _Fp8QKV.apply(
                hidden_states.flatten(0, -2).to(group.compute_dtype),
                concat_biases(group.members),
                *(norms or (None, None)),
                cos_sin,
                attention.config.rms_norm_eps,
                tuple(member.out_features // attention.head_dim for member in group.members[:2]),
                *group.weights,
            )
        return result


def use_fp8_blocks(layers: list[nn.Module]) -> int:
    """Replace attention and MLP modules whose layers all run in FP8; return how many. Call after use_fp8_linears."""
    count = 0
    for layer in layers:
        if type(layer).__name__ not in LAYERS:
            continue
        decoder: Any = layer
        attention, feedforward = decoder.self_attn, decoder.mlp
        projections = _find_group(attention, ("q_proj", "k_proj", "v_proj")) if is_attention(attention) else None
        if projections is not None:
            attention.score_options = find_score_options(attention)
            attention.has_rope = bool(getattr(attention, "use_rope", True))  # SmolLM3 rotates in some layers only
            attention.__class__ = add_mixin(Fp8AttentionBlock, attention.__class__)
            attention.fp8_projections = projections
            count += 1
        is_gelu = find_gelu(feedforward)
        names = () if is_gelu is None else (list_gates(feedforward), ("down_proj",))
        groups = [_find_group(feedforward, group, biases=False) for group in names]
        if groups and None not in groups:
            feedforward.__class__ = add_mixin(Fp8MLPBlock, feedforward.__class__)
            feedforward.fp8_gates, feedforward.is_gelu = groups[0], is_gelu
            count += 1
    return count


def _find_group(block: Any, names: tuple[str, ...], *, biases: bool = True) -> Fp8Group | None:
    """Return the group that consists of a block's layers with these names; None if there is no such group."""
    members = [getattr(block, name) for name in names]
    if not isinstance(members[0], TrainedFp8Linear) or members[0].fp8_group.members != members:
        return None
    return members[0].fp8_group if biases or all(member.bias is None for member in members) else None
