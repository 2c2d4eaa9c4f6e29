"""Autograd functions around the custom ops of fused_layer_ops.py.

`lora_parameters` are passed only so that autograd returns gradients for them: every A, then every B. Their values are
read from the fused weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.training.kernels.elementwise import QKNormRope, rms_norm_backward
from launcher.training.kernels.fused_layer_ops import (
    mlp,
    mlp_backward,
    out_proj,
    out_proj_backward,
    qkv,
    qkv_backward,
)
from launcher.training.kernels.nf4 import StoredWeights, prepare_weight


class LoraBlockShape(NamedTuple):
    """Layout of one fused weight: the matrices that share an input, and their LoRA hyperparameters."""

    out_features: tuple[int, ...]  # of each matrix
    adapted: tuple[int, ...]  # indices of the matrices that have an adapter
    lora_scale: float  # s = alpha / r
    rank: int

    def list_lora_grads(self, a_grad: Tensor, b_grad: Tensor) -> list[Tensor]:
        """Split stacked gradients into one per adapted matrix; return those of every A, then those of every B."""
        a_grads, b_grads = a_grad.split(self.rank), b_grad.split(list(self.out_features))
        return [*(a_grads[index] for index in self.adapted), *(b_grads[index] for index in self.adapted)]


class DropoutSeeds(NamedTuple):
    """One seed per input that LoRA's dropout is applied to, and the probability."""

    seeds: Tensor | None  # None: no dropout
    rate: float


def _cast_grads(grads: list[Tensor], dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    return [grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]


class FusedQKV(torch.autograd.Function):
    """Map the residual stream [tokens, in] to query, key, value [tokens, heads, head_dim].

    Computes RMSNorm, the three projections with LoRA, QK-norm and RoPE.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        dora_scale: Tensor | None,
        norm_weight: Tensor,
        stored: StoredWeights,
        qk_norms: tuple[Tensor | None, Tensor | None],
        cos_sin: tuple[Tensor, Tensor],
        dropout: DropoutSeeds,
        eps: float,
        num_heads: tuple[int, int],  # of queries, of keys and values
        shape: LoraBlockShape,
        bias: Tensor | None,
        *lora_parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the op and save what backward needs; the returned V may be a view of the saved projections."""
        weight = prepare_weight(stored)
        query, key, value, x, x_scales, x_lora, projected, correction = qkv(
            residual, norm_weight, weight, dora_scale, *qk_norms, *cos_sin, eps, *dropout, *num_heads, bias
        )
        if not QKNormRope(dora_scale, *qk_norms, *cos_sin, eps).copies_values:
            kv_shape = num_heads[1], query.shape[2]
            value = projected[:, -kv_shape[0] * kv_shape[1] :].unflatten(1, kv_shape)
        saved = (residual, norm_weight, x, x_scales, x_lora, projected, correction)
        ctx.save_for_backward(*saved, dora_scale, *qk_norms, *cos_sin, dropout.seeds, *stored)
        ctx.dropout_rate, ctx.eps, ctx.shape = dropout.rate, eps, shape
        ctx.dtypes = tuple(parameter.dtype for parameter in lora_parameters)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the residual stream, of DoRA's scale and of the LoRA parameters."""
        grads = tuple(grad.contiguous() for grad in grads)
        residual, norm_weight, x, x_scales, x_lora, projected, correction, *rest = ctx.saved_tensors
        dora_scale, q_norm, k_norm, cos, sin, seeds, *stored = rest
        shape, needs_input_grad = ctx.shape, ctx.needs_input_grad[0]
        x_grad, a_grad, b_grad, scale_grad = qkv_backward(
            *grads,
            *(x, x_scales, x_lora, projected, correction, prepare_weight(tuple(stored), grads[0])),
            *(dora_scale, q_norm, k_norm, cos, sin, ctx.eps, seeds, ctx.dropout_rate),
            *(list(shape.out_features), shape.lora_scale, shape.rank, needs_input_grad),
        )
        return (
            rms_norm_backward(x_grad, residual, norm_weight, ctx.eps) if needs_input_grad else None,
            scale_grad if ctx.needs_input_grad[1] else None,
            *[None] * 9,
            *_cast_grads(shape.list_lora_grads(a_grad, b_grad), ctx.dtypes),
        )


class FusedMLP(torch.autograd.Function):
    """Map the residual stream to the MLP's output and its dropout correction (empty except for DoRA with dropout).

    Computes RMSNorm, gate_proj and up_proj, SwiGLU (or GeGLU) and down_proj.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        dora_scale: Tensor | None,
        norm_weight: Tensor,
        dropout: DropoutSeeds,
        eps: float,
        stored: tuple[StoredWeights, StoredWeights],  # of gate_proj and up_proj, of down_proj
        shapes: tuple[LoraBlockShape, LoraBlockShape],
        is_gelu: bool,
        *lora_parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the op. The SwiGLU output is not saved: backward recomputes it."""
        gate_up_weight, down_weight = (prepare_weight(one) for one in stored)
        gate_is_plain = 0 not in shapes[0].adapted
        y, down_correction, x, x_scales, x_lora, gate_up, correction, hidden_lora = mlp(
            residual, norm_weight, gate_up_weight, down_weight, dora_scale, *dropout, eps, gate_is_plain, is_gelu
        )
        saved = (residual, norm_weight, x, x_scales, x_lora, gate_up, correction, hidden_lora)
        ctx.save_for_backward(*saved, dora_scale, dropout.seeds, *stored[0], *stored[1])
        ctx.dropout_rate, ctx.eps, ctx.shapes, ctx.is_gelu = dropout.rate, eps, shapes, is_gelu
        ctx.dtypes = tuple(parameter.dtype for parameter in lora_parameters)
        return y, down_correction

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the residual stream, of DoRA's scale and of the LoRA parameters."""
        grads = tuple(grad.contiguous() for grad in grads)
        residual, norm_weight, x, x_scales, x_lora, gate_up, correction, hidden_lora, *rest = ctx.saved_tensors
        dora_scale, seeds, *stored = rest
        half = len(stored) // 2
        weights = [prepare_weight(tuple(one), grads[0]) for one in (stored[:half], stored[half:])]
        shape, down_shape = ctx.shapes
        x_grad, a_grad, b_grad, down_a_grad, down_b_grad, scale_grad = mlp_backward(
            *grads,
            *(x, x_scales, x_lora, gate_up, correction, hidden_lora, *weights, dora_scale, seeds, ctx.dropout_rate),
            *(list(shape.out_features), [shape.lora_scale, down_shape.lora_scale], [shape.rank, down_shape.rank]),
            ctx.is_gelu,
        )
        lora_grads = [*shape.list_lora_grads(a_grad, b_grad), *down_shape.list_lora_grads(down_a_grad, down_b_grad)]
        return (
            rms_norm_backward(x_grad, residual, norm_weight, ctx.eps),
            scale_grad if ctx.needs_input_grad[1] else None,
            *[None] * 6,
            *_cast_grads(lora_grads, ctx.dtypes),
        )


class FusedOutProj(torch.autograd.Function):
    """Apply o_proj with LoRA dropout to the attention output [tokens, in]; also return DoRA's dropout correction."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropout: tuple[Tensor, float],
        stored: StoredWeights,
        shape: LoraBlockShape,
        is_dora: bool,
        *lora_parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the op. The dropped input is not saved: backward recomputes it from the seed."""
        seeds, rate = dropout
        y, correction, x_lora = out_proj(x, prepare_weight(stored), seeds, rate, is_dora)
        ctx.save_for_backward(x, x_lora, seeds, *stored)
        ctx.dropout_rate, ctx.shape = rate, shape
        ctx.dtypes = tuple(parameter.dtype for parameter in lora_parameters)
        return y, correction

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the LoRA parameters."""
        x, x_lora, seeds, *stored = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        weight = prepare_weight(tuple(stored), grads[0])
        shape = ctx.shape
        x_grad, *lora_grads = out_proj_backward(
            *grads, x, x_lora, weight, seeds, ctx.dropout_rate, shape.lora_scale, shape.rank
        )
        return x_grad, *[None] * 4, *_cast_grads(lora_grads, ctx.dtypes)
