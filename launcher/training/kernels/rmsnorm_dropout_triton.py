"""Triton kernels over rows: RMSNorm, adapter dropout (seeded_dropout.py), DoRA's column scaling, and strided copies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher.training.kernels.seeded_dropout import DropoutSeed

_COLUMNS = 512
_REDUCTION_COLUMNS = 128  # when summing over tokens
_ROWS = 8  # of element-wise kernels
_REDUCTION_TILE = 16, 8  # tokens per iteration, iterations per program
_WARPS = 4


@triton.jit
def _dropout_factors(indices, seed, threshold, factor):  # type: ignore[no-untyped-def]
    """Return 0 for dropped elements and `factor` for the others, by the same hash as in seeded_dropout.py."""
    bits = (indices.to(tl.uint32) * 0x9E3779B1) ^ seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    bits = (bits ^ (bits >> 16)) >> 8
    return tl.where(bits.to(tl.int32) >= threshold, factor, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_indices(num_rows, num_column_blocks, width, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows and columns of this program's tile, and a mask of those inside the matrix."""
    columns = (tl.program_id(0) % num_column_blocks) * block + tl.arange(0, block)
    tokens = (tl.program_id(0) // num_column_blocks) * rows + tl.arange(0, rows)
    mask = (tokens < num_rows)[:, None] & (columns < width)[None, :]
    return tokens.to(tl.int64)[:, None], columns[None, :], mask


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, side, normed, seed, width, x_stride, out_stride, eps, threshold, factor, block: tl.constexpr,
    drops: tl.constexpr, splits: tl.constexpr, keeps_normed: tl.constexpr,
):  # fmt: skip
    """Compute RMSNorm y of each row. With dropout: `out` = y, `side` = dropout(y).

    With `splits`: `out` = dropout(y), `side` = y - dropout(y), and optionally `normed` = y.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask_columns = columns < width
    x_row = tl.load(x + row * x_stride + columns, mask=mask_columns, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x_row * x_row, axis=0) / width + eps)
    y = x_row * rstd * tl.load(weight + columns, mask=mask_columns, other=0.0).to(tl.float32)
    if drops:
        # Rounded before dropout, because the backward pass reads the rounded value.
        y = y.to(out.dtype.element_ty).to(tl.float32)
        dropped = y * _dropout_factors(row * width + columns, tl.load(seed), threshold, factor)
        side_row = dropped
        if keeps_normed:
            tl.store(normed + row * width + columns, y.to(normed.dtype.element_ty), mask=mask_columns)
        if splits:
            side_row = y - dropped
            y = dropped
        tl.store(side + row * width + columns, side_row.to(side.dtype.element_ty), mask=mask_columns)
    tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=mask_columns)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_backward_kernel(grad, x, weight, out, width, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, block)
    mask_columns = columns < width
    x_row = tl.load(x + start + columns, mask=mask_columns, other=0.0).to(tl.float32)
    dy = tl.load(grad + start + columns, mask=mask_columns, other=0.0).to(tl.float32)
    dy *= tl.load(weight + columns, mask=mask_columns, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x_row * x_row, axis=0) / width + eps)
    x_hat = x_row * rstd
    dx = rstd * (dy - x_hat * (tl.sum(dy * x_hat, axis=0) / width))
    tl.store(out + start + columns, dx.to(out.dtype.element_ty), mask=mask_columns)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_rows_kernel(  # type: ignore[no-untyped-def]
    x, out, num_rows, num_column_blocks, width, x_stride, out_stride, rows: tl.constexpr, block: tl.constexpr
):
    tokens, columns, mask = _tile_indices(num_rows, num_column_blocks, width, rows, block)
    values = tl.load(x + tokens * x_stride + columns, mask=mask)
    tl.store(out + tokens * out_stride + columns, values, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _dropout_kernel(  # type: ignore[no-untyped-def]
    x, out, remainder, seed, num_rows, num_column_blocks, width, x_stride, out_stride, threshold, factor,
    rows: tl.constexpr, block: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """Compute `out` = dropout(x), possibly in place; with `splits`, also `remainder` = x - dropout(x)."""
    tokens, columns, mask = _tile_indices(num_rows, num_column_blocks, width, rows, block)
    indices = tokens * width + columns
    values = tl.load(x + tokens * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    dropped = values * _dropout_factors(indices, tl.load(seed), threshold, factor)
    if splits:
        tl.store(remainder + indices, (values - dropped).to(remainder.dtype.element_ty), mask=mask)
    tl.store(out + tokens * out_stride + columns, dropped.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _dropout_backward_kernel(  # type: ignore[no-untyped-def]
    grad, dropped_grad, seed, num_rows, num_column_blocks, width, threshold, factor, rows: tl.constexpr,
    block: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """Add the gradient that flows back through dropout to `grad`, that of x or, with `splits`, of x - dropout(x)."""
    tokens, columns, mask = _tile_indices(num_rows, num_column_blocks, width, rows, block)
    indices = tokens * width + columns
    dx = tl.load(grad + indices, mask=mask, other=0.0).to(tl.float32)
    d_dropped = tl.load(dropped_grad + indices, mask=mask, other=0.0).to(tl.float32)
    if splits:
        d_dropped -= dx
    result = dx + d_dropped * _dropout_factors(indices, tl.load(seed), threshold, factor)
    tl.store(grad + indices, result.to(grad.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_columns_kernel(  # type: ignore[no-untyped-def]
    y, correction, scales, out, num_tokens, num_column_blocks, width, row_stride, correction_stride,
    rows: tl.constexpr, block: tl.constexpr, has_correction: tl.constexpr,
):  # fmt: skip
    """Compute `out` = y * scales + correction."""
    tokens, columns, mask = _tile_indices(num_tokens, num_column_blocks, width, rows, block)
    result = tl.load(y + tokens * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    result *= tl.load(scales + columns, mask=columns < width, other=0.0)
    if has_correction:
        result += tl.load(correction + tokens * correction_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + tokens * width + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_columns_backward_kernel(  # type: ignore[no-untyped-def]
    grad, y, scales, out, partial_sums, num_tokens, num_column_blocks, width, row_stride, grad_stride,
    rows: tl.constexpr, steps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column_block, token_block = tl.program_id(0) % num_column_blocks, tl.program_id(0) // num_column_blocks
    columns = column_block * block + tl.arange(0, block)
    mask_columns = columns < width
    scale = tl.load(scales + columns, mask=mask_columns, other=0.0)[None, :]
    total = tl.zeros([rows, block], tl.float32)
    for step in range(steps):
        tokens = (token_block * steps + step) * rows + tl.arange(0, rows)
        mask = (tokens < num_tokens)[:, None] & mask_columns[None, :]
        tokens = tokens.to(tl.int64)[:, None]
        dy = tl.load(grad + tokens * grad_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += dy * tl.load(y + tokens * row_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out + tokens * width + columns[None, :], (dy * scale).to(out.dtype.element_ty), mask=mask)
    tl.store(partial_sums + token_block.to(tl.int64) * width + columns, tl.sum(total, axis=0), mask=mask_columns)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    dropping: DropoutSeed | None = None,
    side: Tensor | None = None,
    normed: Tensor | None = None,
    splits: bool = False,
) -> None:
    """Write RMSNorm(x) into the first columns of `out`; `_rms_norm_kernel` describes the outputs with dropout."""
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(len(x),)](
        x,
        weight,
        out,
        out if side is None else side,
        out if normed is None else normed,
        out if dropping is None else dropping.seed,
        width,
        x.stride(0),
        out.stride(0),
        eps,
        0 if dropping is None else dropping.threshold,
        1.0 if dropping is None else 1 / (1 - dropping.rate),
        block=block,
        drops=dropping is not None,
        splits=splits,
        keeps_normed=normed is not None,
        num_warps=min(16, max(1, block // 512)),
    )


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write the gradient of RMSNorm's input x into `out`. All tensors must be contiguous."""
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm_backward_kernel[(len(x),)](
        grad, x, weight, out, width, eps, block=block, num_warps=min(16, max(1, block // 512))
    )


def copy_rows(x: Tensor, out: Tensor) -> None:
    """Copy x into the first columns of `out`, in half the time of torch's strided copy."""
    num_rows, width = x.shape
    num_column_blocks = triton.cdiv(width, _COLUMNS)
    _copy_rows_kernel[(num_column_blocks * triton.cdiv(num_rows, _ROWS),)](
        x,
        out,
        num_rows,
        num_column_blocks,
        width,
        x.stride(0),
        out.stride(0),
        rows=_ROWS,
        block=_COLUMNS,
        num_warps=_WARPS,
    )


def dropout(x: Tensor, out: Tensor, dropping: DropoutSeed, remainder: Tensor | None) -> None:
    """Write d, which is x after dropout, into the first columns of `out`, and x - d into `remainder`, if given."""
    num_rows, width = x.shape
    num_column_blocks = triton.cdiv(width, _COLUMNS)
    _dropout_kernel[(num_column_blocks * triton.cdiv(num_rows, _ROWS),)](
        x,
        out,
        out if remainder is None else remainder,
        dropping.seed,
        num_rows,
        num_column_blocks,
        width,
        x.stride(0),
        out.stride(0),
        dropping.threshold,
        1 / (1 - dropping.rate),
        rows=_ROWS,
        block=_COLUMNS,
        splits=remainder is not None,
        num_warps=_WARPS,
    )


def dropout_backward(grad: Tensor, dropped_grad: Tensor, dropping: DropoutSeed, *, splits: bool) -> None:
    """Add the gradient that flows back through dropout to `grad`, in place; see elementwise.dropout_backward."""
    num_rows, width = grad.shape
    num_column_blocks = triton.cdiv(width, _COLUMNS)
    _dropout_backward_kernel[(num_column_blocks * triton.cdiv(num_rows, _ROWS),)](
        grad,
        dropped_grad,
        dropping.seed,
        num_rows,
        num_column_blocks,
        width,
        dropping.threshold,
        1 / (1 - dropping.rate),
        rows=_ROWS,
        block=_COLUMNS,
        splits=splits,
        num_warps=_WARPS,
    )


def scale_columns(y: Tensor, scales: Tensor, correction: Tensor | None, out: Tensor) -> None:
    """Write y * scales + correction into `out`."""
    num_tokens, width = y.shape
    num_column_blocks = triton.cdiv(width, _COLUMNS)
    _scale_columns_kernel[(num_column_blocks * triton.cdiv(num_tokens, _ROWS),)](
        y,
        y if correction is None else correction,
        scales,
        out,
        num_tokens,
        num_column_blocks,
        width,
        y.stride(0),
        0 if correction is None else correction.stride(0),
        rows=_ROWS,
        block=_COLUMNS,
        has_correction=correction is not None,
        num_warps=_WARPS,
    )


def scale_columns_backward(grad: Tensor, y: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of y into `out` and return the gradient of `scales`."""
    num_tokens, width = y.shape
    rows, steps = _REDUCTION_TILE
    num_programs, num_column_blocks = triton.cdiv(num_tokens, rows * steps), triton.cdiv(width, _REDUCTION_COLUMNS)
    partial_sums = torch.empty(num_programs, width, device=y.device)
    _scale_columns_backward_kernel[(num_column_blocks * num_programs,)](
        grad,
        y,
        scales,
        out,
        partial_sums,
        num_tokens,
        num_column_blocks,
        width,
        y.stride(0),
        grad.stride(0),
        rows=rows,
        steps=steps,
        block=_REDUCTION_COLUMNS,
        num_warps=_WARPS,
    )
    return partial_sums.sum(0)
