"""Triton kernels for fused LoRA weights: copy A and B into them, split their gradients, compute DoRA's row norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_ROWS, _TILE = 32, 32
_SUMMED_TILE = 256, 16  # elements and parts of them, when partial gradients are summed
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit  # type: ignore[untyped-decorator]
def _copy_lora_kernel(table, scales, source_type: tl.constexpr, target_type: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = table + tl.program_id(0) * 7  # columns of the table
    source = tl.load(entry).to(tl.pointer_type(source_type))
    target = tl.load(entry + 1).to(tl.pointer_type(target_type))
    num_rows, num_columns = tl.load(entry + 2), tl.load(entry + 3)
    source_stride, target_stride = tl.load(entry + 4), tl.load(entry + 5)
    indices = tl.program_id(1) * block + tl.arange(0, block)
    rows, columns = indices // num_columns, indices % num_columns
    mask = rows < num_rows
    values = tl.load(source + rows * source_stride + columns, mask=mask).to(tl.float32) * tl.load(
        scales + tl.program_id(0)
    )
    divisors = tl.load(entry + 6)
    if divisors != 0:
        values /= tl.load(divisors.to(tl.pointer_type(tl.float32)) + rows, mask=mask, other=1.0)
    tl.store(target + rows * target_stride + columns, values.to(target_type), mask=mask)


class LoraCopy:
    """Copies all LoRA matrices into the fused weights in one kernel launch.

    Takes (source, target, scale, divisors) and writes target = source * scale, of which each row is divided by its
    divisor if there are any. It stores the addresses of the tensors, so they must not be reallocated.
    """

    def __init__(self, copies: Sequence[tuple[Tensor, Tensor, float, Tensor | None]]) -> None:
        sources, targets, scales, divisors = zip(*copies, strict=True)
        device = sources[0].device
        addresses = [0 if one is None else one.data_ptr() for one in divisors]
        (self._source_type,) = {_TYPES[source.dtype] for source in sources}
        (self._target_type,) = {_TYPES[target.dtype] for target in targets}
        rows = [
            (source.data_ptr(), target.data_ptr(), *source.shape, source.stride(0), target.stride(0), divisor)
            for source, target, divisor in zip(sources, targets, addresses, strict=True)
        ]
        self.addresses = [source.data_ptr() for source in sources]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self._grid = len(rows), triton.cdiv(max(source.numel() for source in sources), _BLOCK)

    def __call__(self) -> None:
        """Launch the kernel that copies A and B into the fused weights."""
        _copy_lora_kernel[self._grid](
            self._table, self._scales, source_type=self._source_type, target_type=self._target_type, block=_BLOCK
        )


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(first, mask, num_parts, part_size, parts: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sums over num_parts tensors of part_size elements; `first` points to elements of the first one."""
    total = tl.zeros(first.shape, tl.float32)
    for start in range(0, num_parts, parts):
        part = start + tl.arange(0, parts)
        inside = mask[None, :] & (part < num_parts)[:, None]
        values = tl.load(first[None, :] + part.to(tl.int64)[:, None] * part_size, mask=inside, other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _split_lora_grads_kernel(  # type: ignore[no-untyped-def]
    a_grads, b_grads, lora_a_grad, lora_b_grad, a_numel, b_numel, num_a_parts, num_b_parts, a_size, b_size, first_end,
    second_end, ranks, scale, rank: tl.constexpr, block: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of A in the first programs, and each row's diagonal block of those of B in the others."""
    num_copying = tl.cdiv(a_numel, block)
    program = tl.program_id(0)
    if program < num_copying:
        indices = program * block + tl.arange(0, block)
        mask = indices < a_numel
        values = _sum_parts(a_grads + indices, mask, num_a_parts, a_size, parts)
        tl.store(lora_a_grad + indices, values.to(lora_a_grad.dtype.element_ty), mask=mask)
    else:
        indices = (program - num_copying) * block + tl.arange(0, block)
        mask = indices < b_numel
        row, column = indices // rank, indices % rank
        matrix = (row >= first_end).to(tl.int32) + (row >= second_end).to(tl.int32)
        diagonal = b_grads + row.to(tl.int64) * ranks + matrix * rank + column
        values = _sum_parts(diagonal, mask, num_b_parts, b_size, parts) * scale
        tl.store(lora_b_grad + indices, values.to(lora_b_grad.dtype.element_ty), mask=mask)


def split_lora_grads(
    a_grads: Tensor, b_grads: Tensor, out_features: list[int], scale: float, lora_a_grad: Tensor, lora_b_grad: Tensor
) -> None:
    """Write dA and dB of up to three matrices to `lora_a_grad` and `lora_b_grad`; see elementwise.split_lora_grads."""
    a_grads, b_grads = (
        (grads if grads.dim() == 3 else grads[None]).contiguous() for grads in (a_grads, b_grads)
    )  # [parts, ...]
    a_numel, b_numel = lora_a_grad.numel(), lora_b_grad.numel()
    block, parts = (_BLOCK, 1) if len(a_grads) == len(b_grads) == 1 else _SUMMED_TILE
    _split_lora_grads_kernel[(triton.cdiv(a_numel, block) + triton.cdiv(b_numel, block),)](
        a_grads,
        b_grads,
        lora_a_grad,
        lora_b_grad,
        a_numel,
        b_numel,
        len(a_grads),
        len(b_grads),
        a_grads[0].numel(),
        b_grads[0].numel(),
        out_features[0],
        sum(out_features[:2]),
        b_grads.shape[2],
        scale,
        rank=lora_b_grad.shape[1],
        block=block,
        parts=parts,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(ptr, row, column, stride, num_rows, num_columns, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row_ids, column_ids = row + tl.arange(0, rows), column + tl.arange(0, columns)
    mask = (row_ids < num_rows)[:, None] & (column_ids < num_columns)[None, :]
    tile = ptr + row_ids.to(tl.int64)[:, None] * stride + column_ids[None, :]
    return tl.load(tile, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _row_norms_kernel(  # type: ignore[no-untyped-def]
    base_a, scaled_b, a_gram, base_squares, norms, num_rows, ranks, b_stride, rows: tl.constexpr, tile: tl.constexpr
):
    """Compute ||W + s B A|| per row in tiles of ranks, because A A^T of a large rank would not fit in shared memory."""
    row = tl.program_id(0) * rows
    row_ids = row + tl.arange(0, rows)
    mask = row_ids < num_rows
    total = tl.load(base_squares + row_ids, mask=mask, other=1.0)
    for column in range(0, ranks, tile):
        acc = 2.0 * _load_tile(base_a, row, column, ranks, num_rows, ranks, rows, tile)
        for inner in range(0, ranks, tile):
            b = _load_tile(scaled_b, row, inner, b_stride, num_rows, ranks, rows, tile)
            gram = _load_tile(a_gram, inner, column, ranks, ranks, ranks, tile, tile)
            acc += tl.dot(b, gram, input_precision="ieee")
        total += tl.sum(_load_tile(scaled_b, row, column, b_stride, num_rows, ranks, rows, tile) * acc, axis=1)
    tl.store(norms + row_ids, tl.sqrt(tl.maximum(total, 1e-12)), mask=mask)


def compute_row_norms(base: Tensor, lora_a: Tensor, scaled_b: Tensor, base_squares: Tensor, norms: Tensor) -> None:
    """Write ||W + s B A|| of each row into `norms`; see update_row_norms in model/fused_lora/weights.py."""
    num_rows, ranks = scaled_b.shape
    to_fp32: dict[str, Any] = {} if base.dtype == torch.float32 else {"out_dtype": torch.float32}
    base_a, a_gram = torch.mm(base, lora_a.t(), **to_fp32), torch.mm(lora_a, lora_a.t(), **to_fp32)
    _row_norms_kernel[(triton.cdiv(num_rows, _ROWS),)](
        base_a, scaled_b, a_gram, base_squares, norms, num_rows, ranks, scaled_b.stride(0), rows=_ROWS, tile=_TILE
    )
