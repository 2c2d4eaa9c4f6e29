"""Triton kernels for QK-norm + RoPE and for SwiGLU or GeGLU, forward and backward, each one pass over memory.

With DoRA the inputs are scaled per column; with DoRA and dropout a second matmul, the `correction`, is added to them.
The backward kernels write straight into the tensor that the next matmul reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Grids are one-dimensional, because only the first dimension may exceed 65,535.
_ROWS = 32  # tokens per program
_SWIGLU_COLUMNS = 128
_WARPS = 4
_REDUCTION_TILE = 16, 8  # tokens per iteration, iterations per program, when summing over tokens

Corrections = tuple[Tensor, Tensor]  # the term added to the scaled input, and a buffer for its gradient


@triton.jit  # type: ignore[untyped-decorator]
def _load_halves(ptr, mask, half: tl.constexpr):  # type: ignore[no-untyped-def]
    x1 = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(ptr + half, mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit  # type: ignore[untyped-decorator]
def _load_norm(query_weight, key_weight, is_query, columns, half: tl.constexpr):  # type: ignore[no-untyped-def]
    if is_query:
        weight1 = tl.load(query_weight + columns).to(tl.float32)
        weight2 = tl.load(query_weight + half + columns).to(tl.float32)
    else:
        weight1 = tl.load(key_weight + columns).to(tl.float32)
        weight2 = tl.load(key_weight + half + columns).to(tl.float32)
    return weight1[None, :], weight2[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _qk_norm_rope_kernel(  # type: ignore[no-untyped-def]
    qkv, correction, scales, query_weight, key_weight, cos, sin, query, key, value, num_tokens, num_heads_total, stride,
    eps, num_heads: tl.constexpr, num_kv_heads: tl.constexpr, half: tl.constexpr, rows: tl.constexpr,
    has_norm: tl.constexpr, has_scales: tl.constexpr, has_correction: tl.constexpr,
):  # fmt: skip
    head, token_block = tl.program_id(0) % num_heads_total, tl.program_id(0) // num_heads_total
    tokens = token_block * rows + tl.arange(0, rows)
    columns = tl.arange(0, half)
    mask = (tokens < num_tokens)[:, None]
    tokens = tokens.to(tl.int64)[:, None]
    offsets = head * 2 * half + columns
    x1, x2 = _load_halves(qkv + tokens * stride + offsets[None, :], mask, half)
    if has_scales:
        x1 *= tl.load(scales + offsets)[None, :]
        x2 *= tl.load(scales + offsets + half)[None, :]
    if has_correction:
        correction1, correction2 = _load_halves(correction + tokens * stride + offsets[None, :], mask, half)
        x1 += correction1
        x2 += correction2
    if head < num_heads + num_kv_heads:
        if has_norm:
            mean = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * half)
            rstd = (1.0 / tl.sqrt(mean + eps))[:, None]
            weight1, weight2 = _load_norm(query_weight, key_weight, head < num_heads, columns, half)
            x1 = x1 * rstd * weight1
            x2 = x2 * rstd * weight2
        angles = tokens * 2 * half + columns[None, :]
        c = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
        rotated = x1 * c - x2 * s
        x2 = x2 * c + x1 * s
        x1 = rotated
    if head < num_heads:
        out_ptr = query + (tokens * num_heads + head) * 2 * half + columns[None, :]
    elif head < num_heads + num_kv_heads:
        out_ptr = key + (tokens * num_kv_heads + (head - num_heads)) * 2 * half + columns[None, :]
    else:
        out_ptr = value + (tokens * num_kv_heads + (head - num_heads - num_kv_heads)) * 2 * half + columns[None, :]
    tl.store(out_ptr, x1.to(query.dtype.element_ty), mask=mask)
    tl.store(out_ptr + half, x2.to(query.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_backward(dy1, dy2, x1, x2, eps, half: tl.constexpr):  # type: ignore[no-untyped-def]
    mean = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * half)
    rstd = (1.0 / tl.sqrt(mean + eps))[:, None]
    x1, x2 = x1 * rstd, x2 * rstd
    mean_dy_x = ((tl.sum(dy1 * x1, axis=1) + tl.sum(dy2 * x2, axis=1)) / (2 * half))[:, None]
    return rstd * (dy1 - x1 * mean_dy_x), rstd * (dy2 - x2 * mean_dy_x)


@triton.jit  # type: ignore[untyped-decorator]
def _qk_norm_rope_backward_kernel(  # type: ignore[no-untyped-def]
    query_grad, key_grad, value_grad, qkv, correction, correction_grad, scales, query_weight, key_weight, cos, sin,
    qkv_grad, partial_sums, num_tokens, num_heads_total, stride, grad_stride, eps, num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr, half: tl.constexpr, rows: tl.constexpr, steps: tl.constexpr, has_norm: tl.constexpr,
    has_scales: tl.constexpr, has_correction: tl.constexpr,
):  # fmt: skip
    """Process one head of `rows * steps` tokens: inverse rotation, then RMSNorm backward."""
    head, token_block = tl.program_id(0) % num_heads_total, tl.program_id(0) // num_heads_total
    columns = tl.arange(0, half)
    offsets = head * 2 * half + columns
    sum1 = tl.zeros([rows, half], tl.float32)
    sum2 = tl.zeros([rows, half], tl.float32)
    for step in range(steps):
        tokens = (token_block * steps + step) * rows + tl.arange(0, rows)
        mask = (tokens < num_tokens)[:, None]
        tokens = tokens.to(tl.int64)[:, None]
        if head < num_heads:
            grad_ptr = query_grad + (tokens * num_heads + head) * 2 * half
        elif head < num_heads + num_kv_heads:
            grad_ptr = key_grad + (tokens * num_kv_heads + (head - num_heads)) * 2 * half
        else:
            grad_ptr = value_grad + (tokens * num_kv_heads + (head - num_heads - num_kv_heads)) * 2 * half
        d1, d2 = _load_halves(grad_ptr + columns[None, :], mask, half)
        if has_scales or has_norm:
            plain1, plain2 = _load_halves(qkv + tokens * stride + offsets[None, :], mask, half)
        if has_scales:
            scale1 = tl.load(scales + offsets)[None, :]
            scale2 = tl.load(scales + offsets + half)[None, :]
        if head < num_heads + num_kv_heads:
            angles = tokens * 2 * half + columns[None, :]
            c = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
            s = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
            rotated = d1 * c + d2 * s
            d2 = d2 * c - d1 * s
            d1 = rotated
            if has_norm:
                x1, x2 = plain1, plain2
                if has_scales:
                    x1, x2 = x1 * scale1, x2 * scale2
                if has_correction:
                    correction1, correction2 = _load_halves(correction + tokens * stride + offsets[None, :], mask, half)
                    x1, x2 = x1 + correction1, x2 + correction2
                weight1, weight2 = _load_norm(query_weight, key_weight, head < num_heads, columns, half)
                d1, d2 = _rms_norm_backward(d1 * weight1, d2 * weight2, x1, x2, eps, half)
        if has_correction:
            correction_grad_ptr = correction_grad + tokens * stride + offsets[None, :]
            tl.store(correction_grad_ptr, d1.to(qkv_grad.dtype.element_ty), mask=mask)
            tl.store(correction_grad_ptr + half, d2.to(qkv_grad.dtype.element_ty), mask=mask)
        if has_scales:
            sum1 += d1 * plain1
            sum2 += d2 * plain2
            d1 *= scale1
            d2 *= scale2
        out_ptr = qkv_grad + tokens * grad_stride + offsets[None, :]
        tl.store(out_ptr, d1.to(qkv_grad.dtype.element_ty), mask=mask)
        tl.store(out_ptr + half, d2.to(qkv_grad.dtype.element_ty), mask=mask)
    if has_scales:
        sum_ptr = partial_sums + token_block.to(tl.int64) * (num_heads + 2 * num_kv_heads) * 2 * half + offsets
        tl.store(sum_ptr, tl.sum(sum1, axis=0))
        tl.store(sum_ptr + half, tl.sum(sum2, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def sigmoid_input(gate, is_gelu: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return v and dv / d(gate) of the activation gate * sigmoid(v): v is gate for SiLU, a cubic for GELU (tanh)."""
    if is_gelu:
        square = gate * gate
        v = gate * (1.5957691216057308 + 0.07135481627260025 * square)  # 2 sqrt(2 / pi) (gate + 0.044715 gate^3)
        slope = 1.5957691216057308 + 0.21406444881780076 * square
    else:
        v = gate
        slope = 1.0
    return v, slope


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_kernel(  # type: ignore[no-untyped-def]
    gate_up, correction, scales, out, num_tokens, num_column_blocks, width, stride, correction_stride, out_stride,
    rows: tl.constexpr, block: tl.constexpr, has_scales: tl.constexpr, num_corrected: tl.constexpr,
    is_gelu: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up, or gelu(gate) * up. `num_corrected`: 0 corrects neither, 1 only `up`, 2 both."""
    column_block, token_block = tl.program_id(0) % num_column_blocks, tl.program_id(0) // num_column_blocks
    columns = column_block * block + tl.arange(0, block)
    tokens = token_block * rows + tl.arange(0, rows)
    inside = columns < width
    mask = (tokens < num_tokens)[:, None] & inside[None, :]
    tokens = tokens.to(tl.int64)[:, None]
    gate_ptr = gate_up + tokens * stride + columns[None, :]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=mask, other=0.0).to(tl.float32)
    if has_scales:
        gate *= tl.load(scales + columns, mask=inside, other=0.0)[None, :]
        up *= tl.load(scales + width + columns, mask=inside, other=0.0)[None, :]
    if num_corrected:
        correction_ptr = correction + tokens * correction_stride + columns[None, :]
        if num_corrected == 2:
            gate += tl.load(correction_ptr, mask=mask, other=0.0).to(tl.float32)
            correction_ptr += width
        up += tl.load(correction_ptr, mask=mask, other=0.0).to(tl.float32)
    v, _ = sigmoid_input(gate, is_gelu)
    result = gate / (1.0 + tl.exp(-v)) * up
    tl.store(out + tokens * out_stride + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad, gate_up, correction, correction_grad, scales, gate_up_grad, partial_sums, num_tokens, num_column_blocks,
    width, stride, correction_stride, gate_up_grad_stride, rows: tl.constexpr, steps: tl.constexpr,
    block: tl.constexpr, has_scales: tl.constexpr, num_corrected: tl.constexpr, is_gelu: tl.constexpr,
):  # fmt: skip
    column_block, token_block = tl.program_id(0) % num_column_blocks, tl.program_id(0) // num_column_blocks
    columns = column_block * block + tl.arange(0, block)
    inside = columns < width
    gate_sum = tl.zeros([rows, block], tl.float32)
    up_sum = tl.zeros([rows, block], tl.float32)
    for step in range(steps):
        tokens = (token_block * steps + step) * rows + tl.arange(0, rows)
        mask = (tokens < num_tokens)[:, None] & inside[None, :]
        tokens = tokens.to(tl.int64)[:, None]
        gate_ptr = gate_up + tokens * stride + columns[None, :]
        grad_ptr = grad + tokens * width + columns[None, :]
        gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_ptr + width, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad_ptr, mask=mask, other=0.0).to(tl.float32)
        plain_gate, plain_up = gate, up
        if has_scales:
            gate_scale = tl.load(scales + columns, mask=inside, other=0.0)[None, :]
            up_scale = tl.load(scales + width + columns, mask=inside, other=0.0)[None, :]
            gate, up = gate * gate_scale, up * up_scale
        if num_corrected:
            correction_ptr = correction + tokens * correction_stride + columns[None, :]
            if num_corrected == 2:
                gate += tl.load(correction_ptr, mask=mask, other=0.0).to(tl.float32)
                correction_ptr += width
            up += tl.load(correction_ptr, mask=mask, other=0.0).to(tl.float32)
        v, slope = sigmoid_input(gate, is_gelu)
        sigmoid = 1.0 / (1.0 + tl.exp(-v))
        activated = gate * sigmoid
        tl.store(grad_ptr, (activated * up).to(grad.dtype.element_ty), mask=mask)
        up_grad = dy * activated
        gate_grad = dy * up * (sigmoid + activated * (1.0 - sigmoid) * slope)
        if num_corrected:
            correction_grad_ptr = correction_grad + tokens * correction_stride + columns[None, :]
            if num_corrected == 2:
                tl.store(correction_grad_ptr, gate_grad.to(gate_up_grad.dtype.element_ty), mask=mask)
                correction_grad_ptr += width
            tl.store(correction_grad_ptr, up_grad.to(gate_up_grad.dtype.element_ty), mask=mask)
        if has_scales:
            gate_sum += gate_grad * plain_gate
            up_sum += up_grad * plain_up
            gate_grad, up_grad = gate_grad * gate_scale, up_grad * up_scale
        out_ptr = gate_up_grad + tokens * gate_up_grad_stride + columns[None, :]
        tl.store(out_ptr, gate_grad.to(gate_up_grad.dtype.element_ty), mask=mask)
        tl.store(out_ptr + width, up_grad.to(gate_up_grad.dtype.element_ty), mask=mask)
    if has_scales:
        sum_ptr = partial_sums + token_block.to(tl.int64) * 2 * width + columns
        tl.store(sum_ptr, tl.sum(gate_sum, axis=0), mask=inside)
        tl.store(sum_ptr + width, tl.sum(up_sum, axis=0), mask=inside)


def qk_norm_rope(
    qkv: Tensor, scales: Tensor | None, norm_weights: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor,
    eps: float, outputs: tuple[Tensor, Tensor, Tensor | None], correction: Tensor | None = None,
) -> None:  # fmt: skip
    """Split `qkv` [tokens, heads * head_dim] into `outputs` (Q, K, V), and apply QK-norm and RoPE to Q and K."""
    query, key, value = outputs
    num_tokens, num_heads, head_dim = query.shape
    num_heads_total = num_heads + (1 if value is None else 2) * key.shape[1]
    query_weight, key_weight = (cos, cos) if norm_weights is None else norm_weights  # not read without norms
    _qk_norm_rope_kernel[(num_heads_total * triton.cdiv(num_tokens, _ROWS),)](
        qkv,
        qkv if correction is None else correction,
        cos if scales is None else scales,
        query_weight,
        key_weight,
        cos,
        sin,
        query,
        key,
        key if value is None else value,
        num_tokens,
        num_heads_total,
        qkv.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        half=head_dim // 2,
        rows=_ROWS,
        has_norm=norm_weights is not None,
        has_scales=scales is not None,
        has_correction=correction is not None,
        num_warps=_WARPS,
    )


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, scales: Tensor | None,
    norm_weights: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, eps: float, qkv_grad: Tensor,
    corrections: Corrections | None = None,
) -> Tensor | None:  # fmt: skip
    """Write the gradient of `qkv` into `qkv_grad` and return the gradient of `scales`, if any."""
    correction, correction_grad = (qkv_grad, qkv_grad) if corrections is None else corrections
    query_grad, key_grad, value_grad = grads
    num_tokens, num_heads, head_dim = query_grad.shape
    rows, steps = _REDUCTION_TILE if scales is not None else (_ROWS, 1)
    num_programs = triton.cdiv(num_tokens, rows * steps)
    num_heads_total = num_heads + 2 * key_grad.shape[1]
    partial_sums = (
        None if scales is None else torch.empty(num_programs, num_heads_total * head_dim, device=qkv_grad.device)
    )
    query_weight, key_weight = (cos, cos) if norm_weights is None else norm_weights
    _qk_norm_rope_backward_kernel[(num_heads_total * num_programs,)](
        query_grad,
        key_grad,
        value_grad,
        qkv,
        correction,
        correction_grad,
        cos if scales is None else scales,
        query_weight,
        key_weight,
        cos,
        sin,
        qkv_grad,
        cos if partial_sums is None else partial_sums,
        num_tokens,
        num_heads_total,
        qkv.stride(0),
        qkv_grad.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=key_grad.shape[1],
        half=head_dim // 2,
        rows=rows,
        steps=steps,
        has_norm=norm_weights is not None,
        has_scales=scales is not None,
        has_correction=corrections is not None,
        num_warps=_WARPS,
    )
    return None if partial_sums is None else partial_sums.sum(0)


def swiglu(
    gate_up: Tensor, scales: Tensor | None, out: Tensor, correction: Tensor | None = None, *, is_gelu: bool = False
) -> None:
    """Write silu(gate) * up, or gelu(gate) * up, into the first columns of `out`; `gate_up` is [tokens, 2 * width]."""
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    num_column_blocks = triton.cdiv(width, _SWIGLU_COLUMNS)
    _swiglu_kernel[(num_column_blocks * triton.cdiv(num_tokens, _ROWS),)](
        gate_up,
        gate_up if correction is None else correction,
        out if scales is None else scales,
        out,
        num_tokens,
        num_column_blocks,
        width,
        gate_up.stride(0),
        0 if correction is None else correction.stride(0),
        out.stride(0),
        rows=_ROWS,
        block=_SWIGLU_COLUMNS,
        has_scales=scales is not None,
        num_corrected=0 if correction is None else correction.shape[1] // width,
        is_gelu=is_gelu,
        num_warps=_WARPS,
    )


def swiglu_backward(
    grad: Tensor, gate_up: Tensor, scales: Tensor | None, gate_up_grad: Tensor,
    corrections: Corrections | None = None, *, is_gelu: bool = False,
) -> Tensor | None:  # fmt: skip
    """Write the input's gradient into `gate_up_grad`, the forward output over `grad`; return the scales' gradient."""
    correction, correction_grad = (gate_up_grad, gate_up_grad) if corrections is None else corrections
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    rows, steps = _REDUCTION_TILE if scales is not None else (_ROWS, 1)
    num_programs = triton.cdiv(num_tokens, rows * steps)
    partial_sums = None if scales is None else torch.empty(num_programs, 2 * width, device=gate_up_grad.device)
    num_column_blocks = triton.cdiv(width, _SWIGLU_COLUMNS)
    _swiglu_backward_kernel[(num_column_blocks * num_programs,)](
        grad,
        gate_up,
        correction,
        correction_grad,
        grad if scales is None else scales,
        gate_up_grad,
        grad if partial_sums is None else partial_sums,
        num_tokens,
        num_column_blocks,
        width,
        gate_up.stride(0),
        correction.stride(0),
        gate_up_grad.stride(0),
        rows=rows,
        steps=steps,
        block=_SWIGLU_COLUMNS,
        has_scales=scales is not None,
        num_corrected=0 if corrections is None else correction.shape[1] // width,
        is_gelu=is_gelu,
        num_warps=_WARPS,
    )
    return None if partial_sums is None else partial_sums.sum(0)
