"""Custom ops of linear layers and blocks whose weights are trained with FP8 matmuls, with backward.

Outputs and gradients of inputs are FP8 matmuls; gradients of weights are matmuls in the compute dtype. Weights that
share an input are a list; they are rounded in every pass, so their codes are not saved. torch.compile treats each op
as opaque. Optional results are empty tensors, because an op cannot return None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.training.kernels import fp8
from launcher.training.kernels.elementwise import QKNormRope, qk_norm_rope
from launcher.training.kernels.fp8 import Fp8Rows, UnroundedGrads


def _multiply(rows: Fp8Rows, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return fp8.matmul(rows, *fp8.quantize_weights(weights), dtype, None)


def _multiply_grad(rows: Fp8Rows, codes: Tensor, dtype: torch.dtype) -> Tensor:
    return fp8.matmul(rows, fp8.transpose(codes), None, dtype, None)


def _weight_grad(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dW = dy^T x. In FP32, sums of 16-bit products are not rounded to 16 bits first."""
    if grad.is_cuda and dtype == torch.float32 and grad.dtype != dtype:
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return (grad.t() @ x).to(dtype)


def _empty_weight_grad(weights: Sequence[Tensor]) -> Tensor:
    return weights[0].new_empty(sum(len(weight) for weight in weights), weights[0].shape[1])


@torch.library.custom_op("launcher::fp8_trained_linear", mutates_args=())
def linear(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Return x W^T for all weights, side by side."""
    return _multiply(fp8.quantize_rows(x), weights, x.dtype)


@linear.register_fake
def _(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(len(x), sum(len(weight) for weight in weights))


@torch.library.custom_op("launcher::fp8_trained_linear_backward", mutates_args=())
def linear_backward(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], needs_input_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and the stacked dW, given the gradient of each weight's output."""
    grad = torch.cat(grads, dim=1) if len(grads) > 1 else grads[0].contiguous()
    x_grad = x.new_empty(0)
    if needs_input_grad:
        codes, scales = fp8.quantize_weights(weights)
        x_grad = _multiply_grad(fp8.quantize_rows(grad, scales), codes, x.dtype)
    return x_grad, _weight_grad(grad, x, weights[0].dtype)


@linear_backward.register_fake
def _(_grads: list[Tensor], x: Tensor, weights: list[Tensor], needs_input_grad: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x) if needs_input_grad else x.new_empty(0), _empty_weight_grad(weights)


@torch.library.custom_op("launcher::fp8_trained_mlp", mutates_args=())
def mlp(
    codes: Tensor, scales: Tensor, gate_up_weights: list[Tensor], down_weight: Tensor, is_gelu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the MLP's output for x in FP8, and gate and up for backward. The activation's output is not saved."""
    gate_up = _multiply(Fp8Rows(codes, scales), gate_up_weights, dtype)
    return _multiply(fp8.swiglu(gate_up, None, is_gelu=is_gelu), [down_weight], dtype), gate_up


@mlp.register_fake
def _(
    codes: Tensor, _scales: Tensor, gate_up_weights: list[Tensor], down_weight: Tensor, _is_gelu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gate_up = codes.new_empty(len(codes), sum(len(weight) for weight in gate_up_weights), dtype=dtype)
    return gate_up.new_empty(len(codes), len(down_weight)), gate_up


@torch.library.custom_op("launcher::fp8_trained_mlp_backward", mutates_args=())
def mlp_backward(
    grad: Tensor, x: Tensor, gate_up: Tensor, gate_up_weights: list[Tensor], down_weight: Tensor, is_gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, the stacked dW of gate and up, and dW of down."""
    codes, scales = fp8.quantize_weights([down_weight])
    hidden = _multiply_grad(fp8.quantize_rows(grad, scales), codes, x.dtype)
    codes, scales = fp8.quantize_weights(gate_up_weights)
    gate_up_grad = torch.empty_like(gate_up)
    rows = fp8.swiglu_backward(hidden, gate_up, scales, is_gelu=is_gelu, unrounded=gate_up_grad)
    down_weight_grad = _weight_grad(grad, hidden, down_weight.dtype)  # swiglu_backward has overwritten `hidden`
    del hidden
    x_grad = _multiply_grad(rows, codes, x.dtype)
    return x_grad, _weight_grad(gate_up_grad, x, down_weight.dtype), down_weight_grad


@mlp_backward.register_fake
def _(
    _grad: Tensor, x: Tensor, _gate_up: Tensor, gate_up_weights: list[Tensor], down_weight: Tensor, _is_gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _empty_weight_grad(gate_up_weights), torch.empty_like(down_weight)


@torch.library.custom_op("launcher::fp8_trained_qkv", mutates_args=())
def qkv(
    codes: Tensor, scales: Tensor, weights: list[Tensor], bias: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, num_heads: int, num_kv_heads: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return Q, K and V for x in FP8, and the projections for backward. V is empty if a view of them can be used."""
    rope = QKNormRope(None, q_norm, k_norm, cos, sin, eps)
    projected = _multiply(Fp8Rows(codes, scales), weights, dtype)
    if bias is not None:
        projected += bias
    query, key, value = qk_norm_rope(projected, rope, num_heads, num_kv_heads)
    empty = query.new_empty(0)
    return query, key, empty if value is None else value, projected if rope.saves_qkv else torch.empty_like(empty)


@qkv.register_fake
def _(
    codes: Tensor, _scales: Tensor, weights: list[Tensor], _bias: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, num_heads: int, num_kv_heads: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rope, (num_tokens, head_dim) = QKNormRope(None, q_norm, k_norm, cos, sin, eps), cos.shape
    key = codes.new_empty(num_tokens, num_kv_heads, head_dim, dtype=dtype)
    num_outputs = sum(len(weight) for weight in weights)
    return (
        key.new_empty(num_tokens, num_heads, head_dim),
        key,
        torch.empty_like(key) if rope.copies_values else key.new_empty(0),
        key.new_empty(num_tokens, num_outputs) if rope.saves_qkv else key.new_empty(0),
    )


@torch.library.custom_op("launcher::fp8_trained_qkv_backward", mutates_args=())
def qkv_backward(
    query_grad: Tensor, key_grad: Tensor, value_grad: Tensor, x: Tensor, projected: Tensor, weights: list[Tensor],
    q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, has_bias: bool,
    needs_input_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, the stacked dW, the gradient of the bias, and those of the weights of q_norm and k_norm, in FP32."""
    rope = QKNormRope(None, q_norm, k_norm, cos, sin, eps)
    codes, scales = fp8.quantize_weights(weights)
    unrounded = UnroundedGrads.allocate(x, len(scales), cos.shape[1], has_norms=rope.norms is not None)
    rows = fp8.qk_norm_rope_backward((query_grad, key_grad, value_grad), projected, rope, scales, unrounded)
    x_grad = _multiply_grad(rows, codes, x.dtype) if needs_input_grad else x.new_empty(0)
    empty = x.new_empty(0, dtype=torch.float32)
    return (
        x_grad,
        _weight_grad(unrounded.qkv, x, weights[0].dtype),
        unrounded.qkv.sum(0, dtype=torch.float32) if has_bias else empty,
        torch.empty_like(empty) if unrounded.norms is None else unrounded.norms.sum(0),
    )


@qkv_backward.register_fake
def _(
    _query_grad: Tensor, _key_grad: Tensor, _value_grad: Tensor, x: Tensor, _projected: Tensor, weights: list[Tensor],
    q_norm: Tensor | None, _k_norm: Tensor | None, cos: Tensor, _sin: Tensor, _eps: float, *flags: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    has_bias, needs_input_grad = flags
    num_outputs = sum(len(weight) for weight in weights)
    return (
        torch.empty_like(x) if needs_input_grad else x.new_empty(0),
        _empty_weight_grad(weights),
        x.new_empty(num_outputs if has_bias else 0, dtype=torch.float32),
        x.new_empty((0,) if q_norm is None else (2, cos.shape[1]), dtype=torch.float32),
    )
