"""What is trained, copied into the blocks that products read: hundreds of small matrices, in one launch. A block's
gradients, parted. And DoRA's lengths of a block's rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_ROWS, _TILE = 32, 32


@triton.jit  # type: ignore[untyped-decorator]
def _fill(table, scales, source_type: tl.constexpr, place_type: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = table + tl.program_id(0) * 6  # numbers in a row of the table
    source = tl.load(entry).to(tl.pointer_type(source_type))
    place = tl.load(entry + 1).to(tl.pointer_type(place_type))
    num_rows, num_columns = tl.load(entry + 2), tl.load(entry + 3)
    source_stride, place_stride = tl.load(entry + 4), tl.load(entry + 5)
    numbers = tl.program_id(1) * block + tl.arange(0, block)
    rows, columns = numbers // num_columns, numbers % num_columns
    mask = rows < num_rows
    values = tl.load(source + rows * source_stride + columns, mask=mask).to(tl.float32) * tl.load(
        scales + tl.program_id(0)
    )
    tl.store(place + rows * place_stride + columns, values.to(place_type), mask=mask)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Filling:
    """(matrix, where it goes, what it is multiplied by) each. Holds addresses: they must not change."""

    def __init__(self, entries: list[tuple[Tensor, Tensor, float]]) -> None:
        sources, places, scales = zip(*entries, strict=True)
        device = sources[0].device
        (self._source_type,) = {_TYPES[one.dtype] for one in sources}
        (self._place_type,) = {_TYPES[one.dtype] for one in places}
        rows = [
            (one.data_ptr(), place.data_ptr(), *one.shape, one.stride(0), place.stride(0))
            for one, place in zip(sources, places, strict=True)
        ]
        self.addresses = [one.data_ptr() for one in sources]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self._grid = len(rows), triton.cdiv(max(one.numel() for one in sources), _BLOCK)

    def __call__(self) -> None:
        _fill[self._grid](
            self._table, self._scales, source_type=self._source_type, place_type=self._place_type, block=_BLOCK
        )


@triton.jit  # type: ignore[untyped-decorator]
def _take_apart(  # type: ignore[no-untyped-def]
    downs,
    ups,
    of_downs,
    of_ups,
    num_downs,
    num_ups,
    first,
    second,
    ranks,
    scale,
    rank: tl.constexpr,
    block: tl.constexpr,
):
    """The first programs copy downs, the others take from each row of ups what belongs to its matrix."""
    num_copying = tl.cdiv(num_downs, block)
    program = tl.program_id(0)
    if program < num_copying:
        numbers = program * block + tl.arange(0, block)
        mask = numbers < num_downs
        tl.store(of_downs + numbers, tl.load(downs + numbers, mask=mask).to(of_downs.dtype.element_ty), mask=mask)
    else:
        numbers = (program - num_copying) * block + tl.arange(0, block)
        mask = numbers < num_ups
        row, column = numbers // rank, numbers % rank
        member = (row >= first).to(tl.int32) + (row >= second).to(tl.int32)
        values = tl.load(ups + row.to(tl.int64) * ranks + member * rank + column, mask=mask).to(tl.float32) * scale
        tl.store(of_ups + numbers, values.to(of_ups.dtype.element_ty), mask=mask)


def take_apart(downs: Tensor, ups: Tensor, sizes: list[int], scale: float, of_downs: Tensor, of_ups: Tensor) -> None:
    """Of up to three matrices; see layer_passes.py."""
    downs, ups = downs.contiguous(), ups.contiguous()
    first, second = sizes[0], sum(sizes[:2])
    num_downs, num_ups = of_downs.numel(), of_ups.numel()
    grid = (triton.cdiv(num_downs, _BLOCK) + triton.cdiv(num_ups, _BLOCK),)
    _take_apart[grid](
        downs,
        ups,
        of_downs,
        of_ups,
        num_downs,
        num_ups,
        first,
        second,
        ups.shape[1],
        scale,
        rank=of_ups.shape[1],
        block=_BLOCK,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(start, row, column, stride, num_rows, num_columns, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    down, across = row + tl.arange(0, rows), column + tl.arange(0, columns)
    mask = (down < num_rows)[:, None] & (across < num_columns)[None, :]
    return tl.load(start + down.to(tl.int64)[:, None] * stride + across[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    products, ups, squared, squares, lengths, num_rows, num_ranks, ups_stride, rows: tl.constexpr, tile: tl.constexpr
):
    """In tiles of ranks: of large ones no square would fit a GPU's shared memory."""
    row = tl.program_id(0) * rows
    here = row + tl.arange(0, rows)
    known = here < num_rows
    total = tl.load(squares + here, mask=known, other=1.0)
    for column in range(0, num_ranks, tile):
        along = 2.0 * _load_tile(products, row, column, num_ranks, num_rows, num_ranks, rows, tile)
        for inner in range(0, num_ranks, tile):
            up = _load_tile(ups, row, inner, ups_stride, num_rows, num_ranks, rows, tile)
            square = _load_tile(squared, inner, column, num_ranks, num_ranks, num_ranks, tile, tile)
            along += tl.dot(up, square, input_precision="ieee")
        total += tl.sum(_load_tile(ups, row, column, ups_stride, num_rows, num_ranks, rows, tile) * along, axis=1)
    tl.store(lengths + here, tl.sqrt(tl.maximum(total, 1e-12)), mask=known)


def measure(weight: Tensor, downs: Tensor, ups: Tensor, squares: Tensor, lengths: Tensor) -> None:
    """Into `lengths`; see products.py."""
    num_rows, num_ranks = ups.shape
    wide: dict[str, Any] = {} if weight.dtype == torch.float32 else {"out_dtype": torch.float32}
    products, squared = torch.mm(weight, downs.t(), **wide), torch.mm(downs, downs.t(), **wide)
    _measure[(triton.cdiv(num_rows, _ROWS),)](
        products, ups, squared, squares, lengths, num_rows, num_ranks, ups.stride(0), rows=_ROWS, tile=_TILE
    )
