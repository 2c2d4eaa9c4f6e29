"""Passes over rows of numbers: norms, forward and backward, copies, what an adapter's dropout does (dropping.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from launcher.training.dropping import Dropping

_COPIED = 512  # columns
_ROWS = 8  # at a time, where each number is looked at by itself
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
    x, weight, out, side, seed, width, x_stride, out_stride, eps, threshold, factor, block: tl.constexpr,
    drops: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """Dropping: the result into `out`, behind dropout into `side`. Split: behind dropout into `out`, the rest aside."""
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
    x, out, seed, num_rows, num_columns, width, x_stride, threshold, factor, rows: tl.constexpr, block: tl.constexpr,
    splits: tl.constexpr,
):  # fmt: skip
    """What stays of x into `out`; or, split, in the place of x, and the rest into `out`."""
    tokens, columns, mask = _find_piece(num_rows, num_columns, width, rows, block)
    here = x + tokens * x_stride + columns
    places = tokens * width + columns
    values = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    dropped = values * _find_factors(places, tl.load(seed), threshold, factor)
    aside = dropped
    if splits:
        aside = values - dropped
        tl.store(here, dropped.to(x.dtype.element_ty), mask=mask)
    tl.store(out + places, aside.to(out.dtype.element_ty), mask=mask)


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


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Into the first columns of `out`."""
    _start_norm(x, weight, eps, out, None, None, splits=False)


def norm_and_drop(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, side: Tensor, dropping: Dropping, *, splits: bool
) -> None:
    _start_norm(x, weight, eps, out, side, dropping, splits=splits)


def _start_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, side: Tensor | None, dropping: Dropping | None, *, splits: bool
) -> None:
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _norm[(len(x),)](
        x,
        weight,
        out,
        out if side is None else side,
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


def drop(x: Tensor, out: Tensor, dropping: Dropping, *, splits: bool) -> None:
    num_rows, width = x.shape
    num_columns = triton.cdiv(width, _COPIED)
    _drop[(num_columns * triton.cdiv(num_rows, _ROWS),)](
        x,
        out,
        dropping.seed,
        num_rows,
        num_columns,
        width,
        x.stride(0),
        dropping.threshold,
        1 / (1 - dropping.rate),
        rows=_ROWS,
        block=_COPIED,
        splits=splits,
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
