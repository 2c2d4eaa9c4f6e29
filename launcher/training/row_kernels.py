"""Passes over rows of numbers, forward and backward: norms, copies, what an adapter's dropout does (dropping.py), and
DoRA's scaling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher.training.dropping import Dropping

_COPIED = 512  # columns
_SCALED = 128  # where they are added up
_ROWS = 8  # at a time, where each number is looked at by itself
_SUMMED = 16, 8  # tokens at a time, and how often, where a program adds up over tokens
_WARPS = 4


@triton.jit
def _find_factors(places, seed, threshold, factor):  # type: ignore[no-untyped-def]
    """The hash of dropping.find_factors."""
    found = (places.to(tl.uint32) * 0x9E3779B1) ^ seed.to(tl.uint32)
    found = (found ^ (found >> 16)) * 0x85EBCA6B
    found = (found ^ (found >> 13)) * 0xC2B2AE35
    found = (found ^ (found >> 16)) >> 8
    return tl.where(found.to(tl.int32) >= threshold, factor, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _find_piece(num_rows, num_columns, width, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a matrix: this program's rows and columns, and which of them there are."""
    columns = (tl.program_id(0) % num_columns) * block + tl.arange(0, block)
    tokens = (tl.program_id(0) // num_columns) * rows + tl.arange(0, rows)
    mask = (tokens < num_rows)[:, None] & (columns < width)[None, :]
    return tokens.to(tl.int64)[:, None], columns[None, :], mask


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, weight, out, side, whole, seed, width, x_stride, out_stride, eps, threshold, factor, block: tl.constexpr,
    drops: tl.constexpr, splits: tl.constexpr, keeps_whole: tl.constexpr,
):  # fmt: skip
    """Dropping: the result into `out`, behind dropout into `side`. Split: behind dropout into `out`, the rest aside;
    and, if wanted, the result itself into `whole`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    result = values * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if drops:
        # As it is read again on the way back: rounded before it is dropped from.
        result = result.to(out.dtype.element_ty).to(tl.float32)
        dropped = result * _find_factors(row * width + columns, tl.load(seed), threshold, factor)
        aside = dropped
        if keeps_whole:
            tl.store(whole + row * width + columns, result.to(whole.dtype.element_ty), mask=inside)
        if splits:
            aside = result - dropped
            result = dropped
        tl.store(side + row * width + columns, aside.to(side.dtype.element_ty), mask=inside)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_back(grad, x, weight, out, width, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, block)
    inside = columns < width
    values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + start + columns, mask=inside, other=0.0).to(tl.float32)
    given *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    straight = values * inverse
    result = inverse * (given - straight * (tl.sum(given * straight, axis=0) / width))
    tl.store(out + start + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(x, out, num_rows, num_columns, width, x_stride, out_stride, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    tokens, columns, mask = _find_piece(num_rows, num_columns, width, rows, block)
    values = tl.load(x + tokens * x_stride + columns, mask=mask)
    tl.store(out + tokens * out_stride + columns, values, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _drop(  # type: ignore[no-untyped-def]
    x, out, rest, seed, num_rows, num_columns, width, x_stride, out_stride, threshold, factor, rows: tl.constexpr,
    block: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """What stays of x into `out`, which may be x; split, what that lacks into `rest`."""
    tokens, columns, mask = _find_piece(num_rows, num_columns, width, rows, block)
    places = tokens * width + columns
    values = tl.load(x + tokens * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    dropped = values * _find_factors(places, tl.load(seed), threshold, factor)
    if splits:
        tl.store(rest + places, (values - dropped).to(rest.dtype.element_ty), mask=mask)
    tl.store(out + tokens * out_stride + columns, dropped.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(  # type: ignore[no-untyped-def]
    grad, dropped_grad, seed, num_rows, num_columns, width, threshold, factor, rows: tl.constexpr, block: tl.constexpr,
    splits: tl.constexpr,
):  # fmt: skip
    """Of the gradient of what was dropped from: x had a part in both, or, split, in one of them."""
    tokens, columns, mask = _find_piece(num_rows, num_columns, width, rows, block)
    places = tokens * width + columns
    straight = tl.load(grad + places, mask=mask, other=0.0).to(tl.float32)
    dropped = tl.load(dropped_grad + places, mask=mask, other=0.0).to(tl.float32)
    if splits:
        dropped -= straight
    result = straight + dropped * _find_factors(places, tl.load(seed), threshold, factor)
    tl.store(grad + places, result.to(grad.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(  # type: ignore[no-untyped-def]
    y, rest, scales, out, num_tokens, num_columns, width, row_stride, rest_stride, rows: tl.constexpr,
    block: tl.constexpr, added: tl.constexpr,
):  # fmt: skip
    """Every column of y by its own number, and the rest behind that."""
    tokens, columns, mask = _find_piece(num_tokens, num_columns, width, rows, block)
    result = tl.load(y + tokens * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    result *= tl.load(scales + columns, mask=columns < width, other=0.0)
    if added:
        result += tl.load(rest + tokens * rest_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + tokens * width + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_back(  # type: ignore[no-untyped-def]
    grad, y, scales, out, sums, num_tokens, num_columns, width, row_stride, grad_stride, rows: tl.constexpr,
    steps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column, part = tl.program_id(0) % num_columns, tl.program_id(0) // num_columns
    columns = column * block + tl.arange(0, block)
    inside = columns < width
    scale = tl.load(scales + columns, mask=inside, other=0.0)[None, :]
    found = tl.zeros([rows, block], tl.float32)
    for step in range(steps):
        tokens = (part * steps + step) * rows + tl.arange(0, rows)
        mask = (tokens < num_tokens)[:, None] & inside[None, :]
        tokens = tokens.to(tl.int64)[:, None]
        given = tl.load(grad + tokens * grad_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        found += given * tl.load(y + tokens * row_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out + tokens * width + columns[None, :], (given * scale).to(out.dtype.element_ty), mask=mask)
    tl.store(sums + part.to(tl.int64) * width + columns, tl.sum(found, axis=0), mask=inside)


def norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    dropping: Dropping | None = None,
    side: Tensor | None = None,
    whole: Tensor | None = None,
    splits: bool = False,
) -> None:
    """Into the first columns of `out`; dropping, as layer_passes.norm_and_drop says."""
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _norm[(len(x),)](
        x,
        weight,
        out,
        out if side is None else side,
        out if whole is None else whole,
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
        keeps_whole=whole is not None,
        num_warps=min(16, max(1, block // 512)),
    )


def norm_back(grad: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """All of them dense."""
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _norm_back[(len(x),)](grad, x, weight, out, width, eps, block=block, num_warps=min(16, max(1, block // 512)))


def copy(x: Tensor, out: Tensor) -> None:
    """Into the first columns of `out`; torch's own copy into part of a matrix takes twice as long."""
    num_rows, width = x.shape
    num_columns = triton.cdiv(width, _COPIED)
    _copy[(num_columns * triton.cdiv(num_rows, _ROWS),)](
        x, out, num_rows, num_columns, width, x.stride(0), out.stride(0), rows=_ROWS, block=_COPIED, num_warps=_WARPS
    )


def drop(x: Tensor, out: Tensor, dropping: Dropping, rest: Tensor | None) -> None:
    num_rows, width = x.shape
    num_columns = triton.cdiv(width, _COPIED)
    _drop[(num_columns * triton.cdiv(num_rows, _ROWS),)](
        x,
        out,
        out if rest is None else rest,
        dropping.seed,
        num_rows,
        num_columns,
        width,
        x.stride(0),
        out.stride(0),
        dropping.threshold,
        1 / (1 - dropping.rate),
        rows=_ROWS,
        block=_COPIED,
        splits=rest is not None,
        num_warps=_WARPS,
    )


def mix(grad: Tensor, dropped_grad: Tensor, dropping: Dropping, *, splits: bool) -> None:
    num_rows, width = grad.shape
    num_columns = triton.cdiv(width, _COPIED)
    _mix[(num_columns * triton.cdiv(num_rows, _ROWS),)](
        grad,
        dropped_grad,
        dropping.seed,
        num_rows,
        num_columns,
        width,
        dropping.threshold,
        1 / (1 - dropping.rate),
        rows=_ROWS,
        block=_COPIED,
        splits=splits,
        num_warps=_WARPS,
    )


def scale(y: Tensor, scales: Tensor, rest: Tensor | None, out: Tensor) -> None:
    num_tokens, width = y.shape
    num_columns = triton.cdiv(width, _COPIED)
    _scale[(num_columns * triton.cdiv(num_tokens, _ROWS),)](
        y,
        y if rest is None else rest,
        scales,
        out,
        num_tokens,
        num_columns,
        width,
        y.stride(0),
        0 if rest is None else rest.stride(0),
        rows=_ROWS,
        block=_COPIED,
        added=rest is not None,
        num_warps=_WARPS,
    )


def scale_back(grad: Tensor, y: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    num_tokens, width = y.shape
    rows, steps = _SUMMED
    num_programs, num_columns = triton.cdiv(num_tokens, rows * steps), triton.cdiv(width, _SCALED)
    sums = torch.empty(num_programs, width, device=y.device)
    _scale_back[(num_columns * num_programs,)](
        grad,
        y,
        scales,
        out,
        sums,
        num_tokens,
        num_columns,
        width,
        y.stride(0),
        grad.stride(0),
        rows=rows,
        steps=steps,
        block=_SCALED,
        num_warps=_WARPS,
    )
    return sums.sum(0)
