"""Triton kernels that round rows to FP8: RMSNorm, SwiGLU and the gradients of SwiGLU and of QK-norm + RoPE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher.training.kernels import fp8
from launcher.training.kernels.rope_swiglu_triton import sigmoid_input

_FP8 = torch.float8_e4m3fn
_SMALLEST: tl.constexpr = tl.constexpr(fp8.SMALLEST)


@triton.jit
def _round_to_fp8(values, amax):  # type: ignore[no-untyped-def]
    """Return the codes and the scale of values whose largest magnitude is amax; those of a row near zero are zero."""
    scale = tl.where(amax > _SMALLEST, amax / 448.0, 0.0)
    return (values * (1.0 / tl.where(scale > 0, scale, 1.0))).to(tl.float8e4nv), scale


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
def _gate_up_grads(  # type: ignore[no-untyped-def]
    grad, gate_up, factors, unrounded, width, columns, is_gelu: tl.constexpr, keeps_grads: tl.constexpr,
):  # fmt: skip
    """Return d(gate) and d(up) times their factors for some columns of a row, and the largest magnitude."""
    mask = columns < width
    gate = tl.load(gate_up + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + columns, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(grad + columns, mask=mask, other=0.0).to(tl.float32)
    v, slope = sigmoid_input(gate, is_gelu)
    sigmoid = 1.0 / (1.0 + tl.exp(-v))
    activated = gate * sigmoid
    tl.store(grad + columns, (activated * up).to(grad.dtype.element_ty), mask=mask)
    gate_grad, up_grad = dy * up * (sigmoid + activated * (1.0 - sigmoid) * slope), dy * activated
    if keeps_grads:
        tl.store(unrounded + columns, gate_grad.to(unrounded.dtype.element_ty), mask=mask)
        tl.store(unrounded + width + columns, up_grad.to(unrounded.dtype.element_ty), mask=mask)
    gate_grad *= tl.load(factors + columns, mask=mask, other=0.0)
    up_grad *= tl.load(factors + width + columns, mask=mask, other=0.0)
    amax = tl.max(tl.maximum(tl.abs(gate_grad), tl.abs(up_grad)), axis=0)
    return gate_grad, up_grad, amax


@triton.jit
def _store_gate_up(codes, gate_grad, up_grad, amax, width, columns):  # type: ignore[no-untyped-def]
    gate_codes, scale = _round_to_fp8(gate_grad, amax)
    up_codes, _ = _round_to_fp8(up_grad, amax)
    tl.store(codes + columns, gate_codes, mask=columns < width)
    tl.store(codes + width + columns, up_codes, mask=columns < width)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad, gate_up, factors, codes, scales, unrounded, width, stride, block: tl.constexpr, rest: tl.constexpr,
    is_gelu: tl.constexpr, keeps_grads: tl.constexpr,
):  # fmt: skip
    """Round d(gate_up) * factors to FP8; overwrite `grad` with the recomputed forward output.

    A row is processed as `block` columns and, if there are more, up to `rest` others: a single block of the next power
    of two would leave up to half of the threads idle.
    """
    row = tl.program_id(0).to(tl.int64)
    grad += row * width
    gate_up += row * stride
    codes += row * 2 * width
    unrounded += row * 2 * width
    columns = tl.arange(0, block)
    gate_grad, up_grad, amax = _gate_up_grads(
        grad, gate_up, factors, unrounded, width, columns, is_gelu, keeps_grads
    )  # fmt: skip
    if rest > 0:
        more = block + tl.arange(0, rest)
        more_gate, more_up, more_amax = _gate_up_grads(
            grad, gate_up, factors, unrounded, width, more, is_gelu, keeps_grads
        )  # fmt: skip
        amax = tl.maximum(amax, more_amax)
        _store_gate_up(codes, more_gate, more_up, amax, width, more)
    tl.store(scales + row, _store_gate_up(codes, gate_grad, up_grad, amax, width, columns))


@triton.jit  # type: ignore[untyped-decorator]
def _load_heads(ptr, head, columns, count: tl.constexpr, padded: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load both halves of `count` heads of one token, padded with zeros."""
    address = ptr + head[:, None] * size + columns[None, :]
    if count == padded:
        x1, x2 = tl.load(address), tl.load(address + size // 2)
    else:
        inside = (head < count)[:, None]
        x1, x2 = tl.load(address, mask=inside, other=0.0), tl.load(address + size // 2, mask=inside, other=0.0)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _head_grads(  # type: ignore[no-untyped-def]
    grad, qkv, norm, cos, sin, factors, unrounded, eps, count: tl.constexpr, padded: tl.constexpr, size: tl.constexpr,
    has_rope: tl.constexpr, has_norm: tl.constexpr, keeps_grads: tl.constexpr,
):  # fmt: skip
    """Return both halves of the gradients of some heads of one token times their factors, and the largest magnitude.

    The last two results are both halves of the terms of the gradient of the norm's weight, by head; zero without norm.
    With `keeps_grads`, the gradients without factors are stored in `unrounded`.
    """
    half: tl.constexpr = size // 2
    head, columns = tl.arange(0, padded), tl.arange(0, half)
    d1, d2 = _load_heads(grad, head, columns, count, padded, size)
    w1, w2 = tl.zeros_like(d1), tl.zeros_like(d2)
    if has_rope:
        c = tl.load(cos + columns).to(tl.float32)[None, :]
        s = tl.load(sin + columns).to(tl.float32)[None, :]
        d1, d2 = d1 * c + d2 * s, d2 * c - d1 * s
    if has_norm:
        x1, x2 = _load_heads(qkv, head, columns, count, padded, size)
        rstd = (1.0 / tl.sqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / size + eps))[:, None]
        x1, x2 = x1 * rstd, x2 * rstd
        w1, w2 = d1 * x1, d2 * x2
        d1 *= tl.load(norm + columns).to(tl.float32)[None, :]
        d2 *= tl.load(norm + half + columns).to(tl.float32)[None, :]
        mean = ((tl.sum(d1 * x1, axis=1) + tl.sum(d2 * x2, axis=1)) / size)[:, None]
        d1, d2 = rstd * (d1 - x1 * mean), rstd * (d2 - x2 * mean)
    if keeps_grads:
        address, inside = unrounded + head[:, None] * size + columns[None, :], (head < count)[:, None]
        tl.store(address, d1.to(unrounded.dtype.element_ty), mask=inside)
        tl.store(address + half, d2.to(unrounded.dtype.element_ty), mask=inside)
    factors1, factors2 = _load_heads(factors, head, columns, count, padded, size)
    d1, d2 = d1 * factors1, d2 * factors2
    amax = tl.max(tl.max(tl.maximum(tl.abs(d1), tl.abs(d2)), axis=1), axis=0)
    return d1, d2, amax, w1, w2


@triton.jit  # type: ignore[untyped-decorator]
def _store_heads(codes, d1, d2, amax, count: tl.constexpr, padded: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    head, columns = tl.arange(0, padded), tl.arange(0, size // 2)
    codes1, scale = _round_to_fp8(d1, amax)
    codes2, _ = _round_to_fp8(d2, amax)
    address, inside = codes + head[:, None] * size + columns[None, :], (head < count)[:, None]
    tl.store(address, codes1, mask=inside)
    tl.store(address + size // 2, codes2, mask=inside)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _qk_norm_rope_backward_kernel(  # type: ignore[no-untyped-def]
    query_grad, key_grad, value_grad, qkv, q_norm, k_norm, cos, sin, factors, codes, scales, unrounded, norm_grads,
    num_tokens, eps, num_heads: tl.constexpr, num_kv_heads: tl.constexpr, size: tl.constexpr,
    padded_heads: tl.constexpr, padded_kv_heads: tl.constexpr, has_norm: tl.constexpr, keeps_grads: tl.constexpr,
    tokens: tl.constexpr,
):  # fmt: skip
    """Compute d(qkv) of some tokens (inverse rotation, RMSNorm backward) and round d(qkv) * factors to FP8."""
    half: tl.constexpr = size // 2
    key_start: tl.constexpr = num_heads * size
    value_start: tl.constexpr = key_start + num_kv_heads * size
    width: tl.constexpr = value_start + num_kv_heads * size
    q_norm1, q_norm2 = tl.zeros([padded_heads, half], tl.float32), tl.zeros([padded_heads, half], tl.float32)
    k_norm1, k_norm2 = tl.zeros([padded_kv_heads, half], tl.float32), tl.zeros([padded_kv_heads, half], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tokens
    for token in range(first, min(first + tokens, num_tokens)):
        row, kv_row = token * width, token * num_kv_heads * size
        cos_row, sin_row = cos + token * size, sin + token * size
        q1, q2, q_amax, w1, w2 = _head_grads(
            query_grad + token * key_start, qkv + row, q_norm, cos_row, sin_row, factors, unrounded + row, eps,
            num_heads, padded_heads, size, True, has_norm, keeps_grads,
        )  # fmt: skip
        q_norm1, q_norm2 = q_norm1 + w1, q_norm2 + w2
        k1, k2, k_amax, w1, w2 = _head_grads(
            key_grad + kv_row, qkv + row + key_start, k_norm, cos_row, sin_row, factors + key_start,
            unrounded + row + key_start, eps, num_kv_heads, padded_kv_heads, size, True, has_norm, keeps_grads,
        )  # fmt: skip
        k_norm1, k_norm2 = k_norm1 + w1, k_norm2 + w2
        v1, v2, v_amax, _, _ = _head_grads(
            value_grad + kv_row, qkv + row, k_norm, cos_row, sin_row, factors + value_start,
            unrounded + row + value_start, eps, num_kv_heads, padded_kv_heads, size, False, False, keeps_grads,
        )  # fmt: skip
        amax = tl.maximum(q_amax, tl.maximum(k_amax, v_amax))
        scale = _store_heads(codes + row, q1, q2, amax, num_heads, padded_heads, size)
        _store_heads(codes + row + key_start, k1, k2, amax, num_kv_heads, padded_kv_heads, size)
        _store_heads(codes + row + value_start, v1, v2, amax, num_kv_heads, padded_kv_heads, size)
        tl.store(scales + token, scale)
    if keeps_grads and has_norm:
        norm_grads += tl.program_id(0).to(tl.int64) * 2 * size + tl.arange(0, half)
        tl.store(norm_grads, tl.sum(q_norm1, axis=0))
        tl.store(norm_grads + half, tl.sum(q_norm2, axis=0))
        tl.store(norm_grads + size, tl.sum(k_norm1, axis=0))
        tl.store(norm_grads + size + half, tl.sum(k_norm2, axis=0))


def _row_options(width: int, per_warp: int = 512) -> dict[str, int]:
    """Return block size and number of warps of a kernel with one program per row."""
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": min(32, max(1, block // per_warp))}


def _new_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), width, dtype=_FP8), x.new_empty(len(x), dtype=torch.float32)


def quantize_rows(
    x: Tensor, factors: Tensor | None, eps: float | None = None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return FP8 codes and scales of x * factors or, with `eps`, of RMSNorm(x) with `factors` as its weights.

    They are written into `out`, if it is given; it is contiguous.
    """
    codes, scales = _new_rows(x, x.shape[1]) if out is None else out
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
        **_row_options(x.shape[1], 1024),
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


def swiglu_backward(
    grad: Tensor, gate_up: Tensor, factors: Tensor, *, is_gelu: bool, unrounded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of d(gate_up) * factors; overwrite `grad`, which is contiguous, with the output.

    d(gate_up) is written into `unrounded`, if it is given; it is contiguous, too.
    """
    width = grad.shape[1]
    codes, scales = _new_rows(grad, 2 * width)
    block = triton.next_power_of_2(width + 1) // 2  # the largest power of two up to the width
    _swiglu_backward_kernel[(len(grad),)](
        grad,
        gate_up,
        factors,
        codes,
        scales,
        codes if unrounded is None else unrounded,
        width,
        gate_up.stride(0),
        block=block,
        rest=triton.next_power_of_2(width - block) if width > block else 0,
        is_gelu=is_gelu,
        keeps_grads=unrounded is not None,
        num_warps=min(32, max(1, block // 256)),
    )
    return codes, scales


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor,
    eps: float, factors: Tensor, unrounded: fp8.UnroundedGrads | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return codes and scales of d(qkv) * factors, given dQ, dK and dV; all tensors are contiguous."""
    num_tokens, num_heads, head_dim = grads[0].shape
    num_kv_heads = grads[1].shape[1]
    codes, scales = _new_rows(cos, (num_heads + 2 * num_kv_heads) * head_dim)
    padded_heads = triton.next_power_of_2(num_heads)
    tokens = 1 if unrounded is None or unrounded.norms is None else fp8.TOKENS_PER_NORM_GRAD
    _qk_norm_rope_backward_kernel[(triton.cdiv(num_tokens, tokens),)](
        *grads,
        qkv,
        *((cos, cos) if norms is None else norms),
        cos,
        sin,
        factors,
        codes,
        scales,
        codes if unrounded is None else unrounded.qkv,
        scales if unrounded is None or unrounded.norms is None else unrounded.norms,
        num_tokens,
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        size=head_dim,
        padded_heads=padded_heads,
        padded_kv_heads=triton.next_power_of_2(num_kv_heads),
        has_norm=norms is not None,
        keeps_grads=unrounded is not None,
        tokens=tokens,
        num_warps=min(16, max(4, padded_heads * head_dim // 512)),
    )
    return codes, scales
