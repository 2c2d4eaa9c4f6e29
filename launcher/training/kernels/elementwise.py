"""Element-wise operations of a fused decoder layer: RMSNorm, QK-norm + RoPE, SwiGLU or GeGLU, dropout, DoRA scaling.

Each function dispatches to a Triton kernel (rope_swiglu_triton.py, rmsnorm_dropout_triton.py, fused_lora_triton.py) or,
on devices without Triton, to plain torch. Many results are written into the first columns of a wider `out` tensor,
whose last columns hold the LoRA part of the matmul that follows. README.md has the equations.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from launcher.training.kernels.availability import supports_triton
from launcher.training.kernels.seeded_dropout import DropoutSeed, compute_dropout_mask

_GELU = 2 * sqrt(2 / pi)


class Correction(NamedTuple):
    """DoRA's dropout correction (x - dropout(x)) W^T, and a buffer for its gradient."""

    value: Tensor
    grad: Tensor


class QKNormRope(NamedTuple):
    """Arguments of QK-norm and RoPE that the forward and the backward pass share: all except the projections."""

    dora_scale: Tensor | None  # [qkv features], fp32; None: LoRA
    q_norm: Tensor | None  # RMSNorm weights [head_dim]; None: a model without QK-norm
    k_norm: Tensor | None
    cos: Tensor  # [tokens, head_dim]
    sin: Tensor
    eps: float

    @property
    def norms(self) -> tuple[Tensor, Tensor] | None:
        """RMSNorm weights of queries and keys; None for a model without QK-norm."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)

    @property
    def saves_qkv(self) -> bool:
        """Whether the projections are saved for backward. RoPE alone does not need them: its gradient is a rotation."""
        return self.dora_scale is not None or self.norms is not None

    @property
    def copies_values(self) -> bool:
        """Whether V is copied to a tensor of its own instead of being a view of the projections.

        DoRA scales them; and if the projections are not saved for backward, a view would keep all of them alive.
        """
        return self.dora_scale is not None or not self.saves_qkv


def qk_norm_rope(
    qkv: Tensor, rope: QKNormRope, num_heads: int, num_kv_heads: int, correction: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split qkv [tokens, features] into heads [tokens, heads, head_dim]; apply QK-norm and RoPE to Q and K.

    The returned V is None if a view of `qkv` can be used instead (see QKNormRope.copies_values).
    """
    num_tokens, head_dim = len(qkv), rope.cos.shape[1]
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    key = qkv.new_empty(num_tokens, num_kv_heads, head_dim)
    value = torch.empty_like(key) if rope.copies_values else None
    if supports_triton(qkv.device):
        from launcher.training.kernels import rope_swiglu_triton

        scale, norms, cos, sin, eps = rope.dora_scale, rope.norms, rope.cos, rope.sin, rope.eps
        rope_swiglu_triton.qk_norm_rope(qkv, scale, norms, cos, sin, eps, (query, key, value), correction)
        return query, key, value
    heads = _scale_and_correct(qkv, rope.dora_scale, correction).unflatten(1, (-1, head_dim))
    num_rotated = num_heads + num_kv_heads
    query.copy_(_norm_and_rotate(heads[:, :num_heads], rope.q_norm, rope.cos, rope.sin, rope.eps))
    key.copy_(_norm_and_rotate(heads[:, num_heads:num_rotated], rope.k_norm, rope.cos, rope.sin, rope.eps))
    if value is not None:
        value.copy_(heads[:, num_rotated:])
    return query, key, value


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    rope: QKNormRope,
    out: Tensor,
    correction: Correction | None = None,
) -> Tensor | None:
    """Write d(qkv) into the first columns of `out`, given dQ, dK, dV; return the gradient of DoRA's scale."""
    if supports_triton(out.device):
        from launcher.training.kernels import rope_swiglu_triton

        scale, norms, cos, sin, eps = rope.dora_scale, rope.norms, rope.cos, rope.sin, rope.eps
        return rope_swiglu_triton.qk_norm_rope_backward(grads, qkv, scale, norms, cos, sin, eps, out, correction)
    query_grad, key_grad, value_grad = (grad.float() for grad in grads)
    num_heads, num_rotated = query_grad.shape[1], query_grad.shape[1] + key_grad.shape[1]
    query_grad, key_grad = (
        _norm_and_rotate(grad, None, rope.cos, -rope.sin, rope.eps) for grad in (query_grad, key_grad)
    )
    if rope.norms is not None:
        added = None if correction is None else correction.value
        heads = _scale_and_correct(qkv, rope.dora_scale, added).unflatten(1, (-1, rope.cos.shape[1]))
        query_grad = rms_norm_backward_torch(query_grad, heads[:, :num_heads], rope.norms[0], rope.eps)
        key_grad = rms_norm_backward_torch(key_grad, heads[:, num_heads:num_rotated], rope.norms[1], rope.eps)
    grad = torch.cat((query_grad, key_grad, value_grad), dim=1).flatten(1)
    if correction is not None:
        correction.grad.copy_(grad)
    out[:, : grad.shape[1]].copy_(_scale_and_correct(grad, rope.dora_scale))
    return None if rope.dora_scale is None else (grad * qkv.float()).sum(0)


def qk_norm_weight_grads(grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, rope: QKNormRope) -> Tensor:
    """Return the gradients of both QK-norms' weights [2, head_dim], in plain torch."""
    heads, start, result = qkv.float().unflatten(1, (-1, rope.cos.shape[1])), 0, []
    for grad in grads[:2]:
        x = heads[:, start : start + grad.shape[1]]
        start += grad.shape[1]
        x_hat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rope.eps)
        result.append((_norm_and_rotate(grad.float(), None, rope.cos, -rope.sin, rope.eps) * x_hat).sum((0, 1)))
    return torch.stack(result)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write RMSNorm(x) into the first columns of `out`."""
    if supports_triton(out.device):
        from launcher.training.kernels import rmsnorm_dropout_triton

        rmsnorm_dropout_triton.rms_norm(x, weight, eps, out)
        return
    x_fp32 = x.float()
    out[:, : x.shape[1]].copy_(x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps) * weight.float())


def rms_norm_dropout(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    side: Tensor,
    seed: DropoutSeed,
    *,
    splits: bool,
    normed: Tensor | None = None,
) -> None:
    """Write y = RMSNorm(x) into the first columns of `out`, and d = dropout(y) into `side`.

    With `splits` (DoRA): d goes into `out`, y - d into `side`, and y into `normed` if it is given.
    """
    if supports_triton(out.device):
        from launcher.training.kernels import rmsnorm_dropout_triton

        rmsnorm_dropout_triton.rms_norm(x, weight, eps, out, seed, side, normed, splits)
        return
    rms_norm(x, weight, eps, out)
    y = out[:, : x.shape[1]]
    if normed is not None:
        normed.copy_(y)
    dropout(y, out if splits else side, seed, side if splits else None)


def dropout(x: Tensor, out: Tensor, seed: DropoutSeed, remainder: Tensor | None = None) -> None:
    """Write d, which is x after dropout, into the first columns of `out` (may be x), and x - d into `remainder`."""
    if supports_triton(out.device):
        from launcher.training.kernels import rmsnorm_dropout_triton

        rmsnorm_dropout_triton.dropout(x, out, seed, remainder)
        return
    dropped = x.float() * compute_dropout_mask(x.shape, seed)
    if remainder is not None:
        remainder.copy_(x.float() - dropped)
    out[:, : x.shape[1]].copy_(dropped)


def dropout_backward(grad: Tensor, dropped_grad: Tensor, seed: DropoutSeed, *, splits: bool = False) -> None:
    """Add the gradient that flows back through dropout to `grad`, which then is the complete gradient of x.

    Before, `grad` is the gradient that bypasses dropout or, with `splits`, that of the remainder x - dropout(x).
    """
    if supports_triton(grad.device):
        from launcher.training.kernels import rmsnorm_dropout_triton

        rmsnorm_dropout_triton.dropout_backward(grad, dropped_grad, seed, splits=splits)
        return
    direct, dropped = grad.float(), dropped_grad.float()
    mask = compute_dropout_mask(grad.shape, seed)
    grad.copy_(direct + (dropped - direct if splits else dropped) * mask)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the gradient of RMSNorm's input x; under torch.compile in plain torch, to be fused with what follows."""
    if not torch.compiler.is_compiling() and supports_triton(x.device):
        from launcher.training.kernels import rmsnorm_dropout_triton

        x_grad = torch.empty_like(x)
        rmsnorm_dropout_triton.rms_norm_backward(grad, x.contiguous(), weight, eps, x_grad)
        return x_grad
    return rms_norm_backward_torch(grad.float(), x.float(), weight, eps).to(x.dtype)


def rms_norm_backward_torch(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the gradient of RMSNorm's input x, in plain torch; `grad` and `x` are fp32."""
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x_hat, grad = x * inverse_rms, grad * weight.float()
    return inverse_rms * (grad - x_hat * (grad * x_hat).mean(-1, keepdim=True))


def copy_columns(x: Tensor, out: Tensor) -> None:
    """Copy x into the first columns of `out`."""
    if supports_triton(out.device):
        from launcher.training.kernels import rmsnorm_dropout_triton

        rmsnorm_dropout_triton.copy_rows(x, out)
        return
    out[:, : x.shape[1]].copy_(x)


def swiglu(
    gate_up: Tensor, dora_scale: Tensor | None, out: Tensor, correction: Tensor | None = None, *, is_gelu: bool = False
) -> None:
    """Write SiLU(gate) * up into the first columns of `out`; gate_up is [tokens, gate + up features].

    With `is_gelu`: GELU(gate) * up, by the tanh approximation (GeGLU, as in Gemma).

    A correction that is only as wide as `up` is added to `up`; a gate_proj without an adapter needs none.
    """
    if supports_triton(out.device):
        from launcher.training.kernels import rope_swiglu_triton

        rope_swiglu_triton.swiglu(gate_up, dora_scale, out, correction, is_gelu=is_gelu)
        return
    gate, up = _scale_and_correct(gate_up, dora_scale, correction).chunk(2, dim=1)
    activated = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
    out[:, : gate_up.shape[1] // 2].copy_(activated * up)


def swiglu_backward(
    grad: Tensor,
    gate_up: Tensor,
    dora_scale: Tensor | None,
    out: Tensor,
    correction: Correction | None = None,
    *,
    is_gelu: bool = False,
) -> Tensor | None:
    """Write d(gate_up) into the first columns of `out`; return the gradient of DoRA's scale.

    Overwrites `grad` with the recomputed forward output, which is not saved for backward.
    """
    if supports_triton(out.device):
        from launcher.training.kernels import rope_swiglu_triton

        return rope_swiglu_triton.swiglu_backward(grad, gate_up, dora_scale, out, correction, is_gelu=is_gelu)
    gate, up = _scale_and_correct(gate_up, dora_scale, None if correction is None else correction.value).chunk(2, dim=1)
    grad_output = grad.float()
    if is_gelu:  # GELU(z) = z sigmoid(v(z))
        v, slope = gate * (_GELU + _GELU * 0.044715 * gate.square()), _GELU + 3 * _GELU * 0.044715 * gate.square()
    else:
        v, slope = gate, torch.ones_like(gate)
    sigmoid = torch.sigmoid(v)
    activated = gate * sigmoid
    gate_grad = grad_output * up * (sigmoid + activated * (1 - sigmoid) * slope)
    gate_up_grad = torch.cat((gate_grad, grad_output * activated), dim=1)
    if correction is not None:
        correction.grad.copy_(gate_up_grad[:, -correction.grad.shape[1] :])
    out[:, : gate_up.shape[1]].copy_(_scale_and_correct(gate_up_grad, dora_scale))
    grad.copy_(activated * up)
    return None if dora_scale is None else (gate_up_grad * gate_up.float()).sum(0)


def scale_columns(y: Tensor, scale: Tensor, correction: Tensor | None, out: Tensor) -> None:
    """Write y * scale + correction into `out`, with one scale per column."""
    if supports_triton(out.device):
        from launcher.training.kernels import rmsnorm_dropout_triton

        rmsnorm_dropout_triton.scale_columns(y, scale, correction, out)
        return
    scaled = y.to(get_grad_dtype(y.dtype)) * scale
    out.copy_(scaled if correction is None else scaled + correction)


def scale_columns_backward(grad_output: Tensor, y: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of y into `out`; return that of the scale."""
    if supports_triton(out.device):
        from launcher.training.kernels import rmsnorm_dropout_triton

        return rmsnorm_dropout_triton.scale_columns_backward(grad_output, y, scale, out)
    grad = grad_output.to(get_grad_dtype(grad_output.dtype))
    out.copy_(grad * scale)
    return (grad * y).sum(0)


def get_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of LoRA weights are accumulated: at least fp32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def split_lora_grads(
    a_grads: Tensor, b_grads: Tensor, out_features: list[int], scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """Return the stacked dA [matrices * rank, in] and dB [out, rank] of the matrices of a fused weight.

    The diagonal blocks of `b_grads` [out, ranks] are dB / scale of one matrix each; the other blocks are ignored. Both
    may have a leading dimension of parts, which are summed.
    """
    num_ranks, dtype = rank * len(out_features), get_grad_dtype(a_grads.dtype)
    lora_a_grad = a_grads.new_empty(num_ranks, a_grads.shape[-1], dtype=dtype)
    lora_b_grad = b_grads.new_empty(b_grads.shape[-2], rank, dtype=dtype)
    if supports_triton(a_grads.device):
        from launcher.training.kernels import fused_lora_triton

        fused_lora_triton.split_lora_grads(a_grads, b_grads, out_features, scale, lora_a_grad, lora_b_grad)
        return lora_a_grad, lora_b_grad
    a_grads, b_grads = (grads.sum(0) if grads.dim() == 3 else grads for grads in (a_grads, b_grads))
    lora_a_grad.copy_(a_grads[:num_ranks])
    rows = b_grads.split(out_features)
    torch.cat([row[:, i * rank : (i + 1) * rank].to(dtype) for i, row in enumerate(rows)], out=lora_b_grad)
    return lora_a_grad, lora_b_grad.mul_(scale)


def _scale_and_correct(states: Tensor, dora_scale: Tensor | None, correction: Tensor | None = None) -> Tensor:
    """Return states * dora_scale + correction in fp32; a narrower correction is added to the last columns only."""
    result = states.float() if dora_scale is None else states.float() * dora_scale
    if correction is not None:
        width = correction.shape[1]
        result = torch.cat((result[:, :-width], result[:, -width:] + correction.float()), dim=1)
    return result


def _norm_and_rotate(heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    if weight is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()
    x1, x2 = heads.chunk(2, dim=-1)
    rotated = torch.cat((-x2, x1), dim=-1)
    return heads * cos.float()[:, None] + rotated * sin.float()[:, None]
