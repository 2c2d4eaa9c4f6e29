"""Triton kernels that round rows to FP8: RMSNorm, SwiGLU and the gradients of SwiGLU and of QK-norm + RoPE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher.training.kernels.rope_swiglu_triton import sigmoid_input

_FP8 = torch.float8_e4m3fn


@triton.jit
def _round_to_fp8(values, amax):  # type: ignore[no-untyped-def]
    """Return the codes and the scale of values whose largest magnitude is amax; the scale of zeros is zero."""
    scale = amax / 448.0
    return (values / tl.where(scale > 0, scale, 1.0)).to(tl.float8e4nv), scale


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x, factors, codes, scales, width, x_stride, eps, block: tl.constexpr, has_norm: tl.constexpr,
    has_factors: tl.constexpr,
):  # fmt: skip
    """Round x * factors or, with `has_norm`, x / rms(x) * factors to FP8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if has_norm:
        values *= 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    if has_factors:
        values *= tl.load(factors + columns, mask=mask, other=0.0).to(tl.float32)
    rounded, scale = _round_to_fp8(values, tl.max(tl.abs(values), axis=0))
    tl.store(scales + row, scale)
    tl.store(codes + row * width + columns, rounded, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_kernel(  # type: ignore[no-untyped-def]
    gate_up, dora_scales, codes, scales, width, stride, block: tl.constexpr, has_scales: tl.constexpr,
    is_gelu: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    if has_scales:
        gate *= tl.load(dora_scales + columns, mask=mask, other=0.0)
        up *= tl.load(dora_scales + width + columns, mask=mask, other=0.0)
    v, _ = sigmoid_input(gate, is_gelu)
    hidden = gate / (1.0 + tl.exp(-v)) * up
    rounded, scale = _round_to_fp8(hidden, tl.max(tl.abs(hidden), axis=0))
    tl.store(scales + row, scale)
    tl.store(codes + row * width + columns, rounded, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad, gate_up, factors, codes, scales, width, stride, block: tl.constexpr, is_gelu: tl.constexpr
):
    """Round d(gate_up) * factors to FP8; overwrite `grad` with the recomputed forward output."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    v, slope = sigmoid_input(gate, is_gelu)
    sigmoid = 1.0 / (1.0 + tl.exp(-v))
    activated = gate * sigmoid
    tl.store(grad + row * width + columns, (activated * up).to(grad.dtype.element_ty), mask=mask)
    gate_grad = dy * up * (sigmoid + activated * (1.0 - sigmoid) * slope)
    gate_grad *= tl.load(factors + columns, mask=mask, other=0.0)
    up_grad = dy * activated * tl.load(factors + width + columns, mask=mask, other=0.0)
    amax = tl.maximum(tl.max(tl.abs(gate_grad), axis=0), tl.max(tl.abs(up_grad), axis=0))
    gate_codes, scale = _round_to_fp8(gate_grad, amax)
    up_codes, _ = _round_to_fp8(up_grad, amax)
    tl.store(scales + row, scale)
    tl.store(codes + row * 2 * width + columns, gate_codes, mask=mask)
    tl.store(codes + row * 2 * width + width + columns, up_codes, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _load_heads(ptr, token, head, first, count, columns, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load both halves of the heads `first` to `first + count` of one token; other heads are zero."""
    mask = ((head >= first) & (head < first + count))[:, None]
    address = ptr + (token * count + head - first)[:, None] * size + columns[None, :]
    x1 = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    return x1, tl.load(address + size // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _qk_norm_rope_backward_kernel(  # type: ignore[no-untyped-def]
    query_grad, key_grad, value_grad, qkv, q_norm, k_norm, cos, sin, factors, codes, scales, eps,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, size: tl.constexpr, padded_heads: tl.constexpr,
    has_norm: tl.constexpr,
):  # fmt: skip
    """Compute d(qkv) of one token (inverse rotation, RMSNorm backward) and round d(qkv) * factors to FP8."""
    half: tl.constexpr = size // 2
    total: tl.constexpr = num_heads + 2 * num_kv_heads
    token = tl.program_id(0).to(tl.int64)
    head, columns = tl.arange(0, padded_heads), tl.arange(0, half)
    is_query, is_rotated = (head < num_heads)[:, None], (head < num_heads + num_kv_heads)[:, None]
    d1, d2 = _load_heads(query_grad, token, head, 0, num_heads, columns, size)
    dk1, dk2 = _load_heads(key_grad, token, head, num_heads, num_kv_heads, columns, size)
    dv1, dv2 = _load_heads(value_grad, token, head, num_heads + num_kv_heads, num_kv_heads, columns, size)
    d1, d2 = d1 + dk1, d2 + dk2
    c = tl.load(cos + token * size + columns).to(tl.float32)[None, :]
    s = tl.load(sin + token * size + columns).to(tl.float32)[None, :]
    d1, d2 = d1 * c + d2 * s, d2 * c - d1 * s
    if has_norm:
        address = qkv + (token * total + head)[:, None] * size + columns[None, :]
        x1 = tl.load(address, mask=is_rotated, other=0.0).to(tl.float32)
        x2 = tl.load(address + half, mask=is_rotated, other=0.0).to(tl.float32)
        d1 *= tl.where(is_query, tl.load(q_norm + columns)[None, :], tl.load(k_norm + columns)[None, :]).to(tl.float32)
        d2 *= tl.where(
            is_query, tl.load(q_norm + half + columns)[None, :], tl.load(k_norm + half + columns)[None, :]
        ).to(tl.float32)
        rstd = (1.0 / tl.sqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / size + eps))[:, None]
        x1, x2 = x1 * rstd, x2 * rstd
        mean = ((tl.sum(d1 * x1, axis=1) + tl.sum(d2 * x2, axis=1)) / size)[:, None]
        d1, d2 = rstd * (d1 - x1 * mean), rstd * (d2 - x2 * mean)
    offsets = head[:, None] * size + columns[None, :]
    inside = (head < total)[:, None]
    d1 = (d1 + dv1) * tl.load(factors + offsets, mask=inside, other=0.0)
    d2 = (d2 + dv2) * tl.load(factors + offsets + half, mask=inside, other=0.0)
    amax = tl.maximum(tl.max(tl.max(tl.abs(d1), axis=1), axis=0), tl.max(tl.max(tl.abs(d2), axis=1), axis=0))
    codes1, scale = _round_to_fp8(d1, amax)
    codes2, _ = _round_to_fp8(d2, amax)
    tl.store(scales + token, scale)
    tl.store(codes + token * total * size + offsets, codes1, mask=inside)
    tl.store(codes + token * total * size + offsets + half, codes2, mask=inside)


def _row_options(width: int, per_warp: int = 512) -> dict[str, int]:
    """Return block size and number of warps of a kernel with one program per row."""
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": min(32, max(1, block // per_warp))}


def _new_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), width, dtype=_FP8), x.new_empty(len(x), dtype=torch.float32)


def quantize_rows(x: Tensor, factors: Tensor | None, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """Return FP8 codes and scales of x * factors or, with `eps`, of RMSNorm(x) with `factors` as its weights."""
    codes, scales = _new_rows(x, x.shape[1])
    _quantize_rows_kernel[(len(x),)](
        x,
        x if factors is None else factors,
        codes,
        scales,
        x.shape[1],
        x.stride(0),
        eps or 0.0,
        has_norm=eps is not None,
        has_factors=factors is not None,
        **_row_options(x.shape[1]),
    )
    return codes, scales


def swiglu(gate_up: Tensor, dora_scale: Tensor | None, *, is_gelu: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of silu(gate) * up, or of gelu(gate) * up."""
    width = gate_up.shape[1] // 2
    codes, scales = _new_rows(gate_up, width)
    _swiglu_kernel[(len(gate_up),)](
        gate_up,
        gate_up if dora_scale is None else dora_scale,
        codes,
        scales,
        width,
        gate_up.stride(0),
        has_scales=dora_scale is not None,
        is_gelu=is_gelu,
        **_row_options(width),
    )
    return codes, scales


def swiglu_backward(grad: Tensor, gate_up: Tensor, factors: Tensor, *, is_gelu: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of d(gate_up) * factors; overwrite `grad`, which is contiguous, with the output."""
    width = grad.shape[1]
    codes, scales = _new_rows(grad, 2 * width)
    _swiglu_backward_kernel[(len(grad),)](
        grad, gate_up, factors, codes, scales, width, gate_up.stride(0), is_gelu=is_gelu, **_row_options(width, 256)
    )
    return codes, scales


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor,
    eps: float, factors: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return codes and scales of d(qkv) * factors, given dQ, dK and dV; all tensors are contiguous."""
    num_tokens, num_heads, head_dim = grads[0].shape
    num_kv_heads = grads[1].shape[1]
    codes, scales = _new_rows(cos, (num_heads + 2 * num_kv_heads) * head_dim)
    padded_heads = triton.next_power_of_2(num_heads + 2 * num_kv_heads)
    _qk_norm_rope_backward_kernel[(num_tokens,)](
        *grads,
        qkv,
        *((cos, cos) if norms is None else norms),
        cos,
        sin,
        factors,
        codes,
        scales,
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        size=head_dim,
        padded_heads=padded_heads,
        has_norm=norms is not None,
        num_warps=min(16, max(4, padded_heads * head_dim // 1024)),
    )
    return codes, scales
