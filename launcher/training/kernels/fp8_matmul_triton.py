"""Triton kernels for the matmuls of FP8 rows with the FP8 base weight (LoRA's term included) and with LoRA's A and B.

The base's matmul is for compute capability 9.0: it is persistent, loads tiles with the tensor memory accelerator, and
reaches the speed of torch's `_scaled_mm` with LoRA's term included. The others run wherever FP8 exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from launcher.training.kernels.fp8 import LoraTerm

_TILE = 128, 256, 128  # tokens, outputs, inputs of the matmul
_GROUP = 8  # tiles of tokens that are processed with the same weights in cache
_MAX_RANKS = 64  # of one LoRA tile
_PROGRAMS_PER_SM = 2  # that fill a multiprocessor
_PROJECTED_INPUTS, _MIN_SPLIT_INPUTS = 128, 1024  # of an iteration and of a program
_MIN_SUMMED_TOKENS = 512  # of a program with wide tiles
_TRANSPOSED = 64


@triton.jit  # type: ignore[untyped-decorator]
def _matmul_kernel(  # type: ignore[no-untyped-def]
    x, weight, x_scales, w_scales, left, right, y, num_tokens, num_outputs, num_inputs, num_programs,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, group: tl.constexpr, has_lora: tl.constexpr,
    has_scales: tl.constexpr, is_transposed: tl.constexpr,
):  # fmt: skip
    """Compute y, of which each program takes every num_programs-th tile; all matrices are tensor descriptors.

    LoRA's tiles are loaded through descriptors after the inner loop. If they were loaded through pointers before the
    loop, Triton 3.6 would read those of another tile if y has scales; through pointers after the loop, the kernel would
    be 10 to 20 % slower.
    """
    num_row_tiles, num_column_tiles = tl.cdiv(num_tokens, rows), tl.cdiv(num_outputs, columns)
    per_group = group * num_column_tiles
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, num_programs, flatten=True):
        first = (tile // per_group) * group
        size = min(num_row_tiles - first, group)
        row = (first + (tile % per_group) % size) * rows
        column = ((tile % per_group) // size) * columns
        row_ids, column_ids = row + tl.arange(0, rows), column + tl.arange(0, columns)
        acc = tl.zeros([rows, columns], tl.float32)
        for inner in range(tl.cdiv(num_inputs, depth)):
            acc = tl.dot(x.load([row, inner * depth]), weight.load([column, inner * depth]).T, acc)
        acc *= tl.load(x_scales + row_ids, mask=row_ids < num_tokens, other=0.0)[:, None]
        if has_scales:
            acc *= tl.load(w_scales + column_ids, mask=column_ids < num_outputs, other=0.0)[None, :]
        if has_lora and is_transposed:
            acc = tl.dot(left.load([row, 0]), right.load([column, 0]).T, acc)
        elif has_lora:
            acc = tl.dot(left.load([row, 0]), right.load([0, column]), acc)
        halves = tl.permute(tl.reshape(acc, (rows, 2, columns // 2)), (0, 2, 1))
        first_half, second_half = tl.split(halves)
        y.store([row, column], first_half.to(y.dtype))
        y.store([row, column + columns // 2], second_half.to(y.dtype))


@triton.jit  # type: ignore[untyped-decorator]
def _convert(codes, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert FP8 codes through FP32: a direct conversion to BF16 needs a slow instruction for each number."""
    return codes.to(tl.float32).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _project_rows_kernel(  # type: ignore[no-untyped-def]
    codes, row_scales, right, out, num_tokens, width, ranks, in_stride, rank_stride, inputs_per_program,
    tokens: tl.constexpr, inputs: tl.constexpr, tile_ranks: tl.constexpr,
):  # fmt: skip
    """Write rows @ right; programs of axis 2 write partial sums."""
    token_ids = tl.program_id(0) * tokens + tl.arange(0, tokens)
    rank_ids = tl.program_id(1) * tile_ranks + tl.arange(0, tile_ranks)
    inside_tokens, inside_ranks = token_ids < num_tokens, rank_ids < ranks
    acc = tl.zeros([tokens, tile_ranks], tl.float32)
    first = tl.program_id(2) * inputs_per_program
    for start in range(first, min(first + inputs_per_program, width), inputs):
        input_ids = start + tl.arange(0, inputs)
        inside = input_ids < width
        row_ptr = codes + token_ids.to(tl.int64)[:, None] * width + input_ids[None, :]
        values = tl.load(row_ptr, mask=inside_tokens[:, None] & inside[None, :], other=0.0)
        right_ptr = right + input_ids.to(tl.int64)[:, None] * in_stride + rank_ids[None, :] * rank_stride
        factors = tl.load(right_ptr, mask=inside[:, None] & inside_ranks[None, :], other=0.0)
        acc = tl.dot(_convert(values, right.dtype.element_ty), factors, acc)
    acc *= tl.load(row_scales + token_ids, mask=inside_tokens, other=0.0)[:, None]
    out += tl.program_id(2).to(tl.int64) * num_tokens * ranks
    out_ptr = out + token_ids.to(tl.int64)[:, None] * ranks + rank_ids[None, :]
    tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=inside_tokens[:, None] & inside_ranks[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _sum_splits_kernel(parts, out, size, num_splits, block: tl.constexpr):  # type: ignore[no-untyped-def]
    ids = tl.program_id(0) * block + tl.arange(0, block)
    inside = ids < size
    total = tl.zeros([block], tl.float32)
    for _ in range(num_splits):
        total += tl.load(parts + ids, mask=inside, other=0.0)
        parts += size
    tl.store(out + ids, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_products_kernel(  # type: ignore[no-untyped-def]
    codes, row_scales, left, column_scales, sums, num_tokens, width, ranks, left_stride, tokens_per_program,
    tokens: tl.constexpr, features: tl.constexpr, tile_ranks: tl.constexpr, divides: tl.constexpr,
    transposed: tl.constexpr,
):  # fmt: skip
    """Compute partial sums over tokens of left^T @ rows; with `divides`, they are divided by column_scales."""
    feature_ids = tl.program_id(0) * features + tl.arange(0, features)
    rank_ids = tl.program_id(2) * tile_ranks + tl.arange(0, tile_ranks)
    inside_features, inside_ranks = feature_ids < width, rank_ids < ranks
    start = tl.program_id(1) * tokens_per_program
    acc = tl.zeros([tile_ranks, features], tl.float32)
    for first in range(start, min(start + tokens_per_program, num_tokens), tokens):
        token_ids = first + tl.arange(0, tokens)
        inside = token_ids < num_tokens
        wide = token_ids.to(tl.int64)
        row_ptr = codes + wide[:, None] * width + feature_ids[None, :]
        values = tl.load(row_ptr, mask=inside[:, None] & inside_features[None, :], other=0.0)
        left_ptr = left + wide[:, None] * left_stride + rank_ids[None, :]
        factors = tl.load(left_ptr, mask=inside[:, None] & inside_ranks[None, :], other=0.0).to(tl.float32)
        factors *= tl.load(row_scales + token_ids, mask=inside, other=0.0)[:, None]
        factors = factors.to(left.dtype.element_ty)
        acc = tl.dot(tl.trans(factors), _convert(values, left.dtype.element_ty), acc)
    if divides:
        acc /= tl.load(column_scales + feature_ids, mask=inside_features, other=1.0)[None, :]
    part = sums + tl.program_id(1).to(tl.int64) * width * ranks
    mask = inside_ranks[:, None] & inside_features[None, :]
    if transposed:
        tl.store(part + feature_ids[None, :] * ranks + rank_ids[:, None], acc, mask=mask)
    else:
        tl.store(part + rank_ids[:, None] * width + feature_ids[None, :], acc, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _transpose_kernel(source, target, num_rows, num_columns, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    row_ids = tl.program_id(0) * tile + tl.arange(0, tile)
    column_ids = tl.program_id(1) * tile + tl.arange(0, tile)
    inside_rows, inside_columns = row_ids < num_rows, column_ids < num_columns
    source_ptr = source + row_ids.to(tl.int64)[:, None] * num_columns + column_ids[None, :]
    values = tl.load(source_ptr, mask=inside_rows[:, None] & inside_columns[None, :])
    target_ptr = target + column_ids.to(tl.int64)[:, None] * num_rows + row_ids[None, :]
    tl.store(target_ptr, tl.trans(values), mask=inside_columns[:, None] & inside_rows[None, :])


def matmul(
    x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor | None, dtype: torch.dtype, lora: LoraTerm | None
) -> Tensor:
    """Return (x weight^T) * x_scales * w_scales + LoRA's term in `dtype`; x and weight are FP8 codes."""
    ranks = 0 if lora is None else lora.left.shape[1]
    if lora is not None and (ranks > _MAX_RANKS or not (_is_aligned(lora.left) and _is_aligned(lora.right))):
        # Its tiles would not fit into shared memory, or tensor descriptors cannot load them.
        added = lora.left, lora.right.t() if lora.is_transposed else lora.right
        return matmul(x, x_scales, weight, w_scales, dtype, None).addmm_(*added)
    (num_tokens, num_inputs), num_outputs = x.shape, len(weight)
    rows, columns, depth = _TILE
    y = x.new_empty(num_tokens, num_outputs, dtype=dtype)
    describe = TensorDescriptor.from_tensor
    tile_ranks, is_transposed = max(16, triton.next_power_of_2(ranks)), lora is not None and lora.is_transposed
    left: Any = None if lora is None else lora.left
    right: Any = None if lora is None else lora.right
    if lora is not None:
        left = describe(left, [rows, tile_ranks])
        right = describe(right, [columns, tile_ranks] if is_transposed else [tile_ranks, columns])
    num_tiles = triton.cdiv(num_tokens, rows) * triton.cdiv(num_outputs, columns)
    num_programs = min(num_tiles, _count_multiprocessors(x.device))
    _matmul_kernel[(num_programs,)](
        describe(x, [rows, depth]),
        describe(weight, [columns, depth]),
        x_scales,
        x_scales if w_scales is None else w_scales,
        left,
        right,
        describe(y, [rows, columns // 2]),
        num_tokens,
        num_outputs,
        num_inputs,
        num_programs,
        rows=rows,
        columns=columns,
        depth=depth,
        group=_GROUP,
        has_lora=lora is not None,
        has_scales=w_scales is not None,
        is_transposed=is_transposed,
        num_stages=3,
        num_warps=8,
    )
    return y


def project_rows(codes: Tensor, row_scales: Tensor, right: Tensor) -> Tensor:
    """Return rows @ right [tokens, ranks]."""
    (num_tokens, width), ranks = codes.shape, right.shape[1]
    tile_ranks = min(_MAX_RANKS, max(16, triton.next_power_of_2(ranks)))
    num_slots = _PROGRAMS_PER_SM * _count_multiprocessors(codes.device)
    tokens, stages = (128, 3) if num_tokens >= 64 * num_slots else (64, 4)
    grid = triton.cdiv(num_tokens, tokens), triton.cdiv(ranks, tile_ranks)
    num_splits = max(1, min(num_slots // (grid[0] * grid[1]), width // _MIN_SPLIT_INPUTS))
    per_program = triton.cdiv(triton.cdiv(width, num_splits), _PROJECTED_INPUTS) * _PROJECTED_INPUTS
    num_splits = triton.cdiv(width, per_program)
    out = right.new_empty(num_tokens, ranks)
    parts = out if num_splits == 1 else right.new_empty(num_splits, num_tokens, ranks, dtype=torch.float32)
    _project_rows_kernel[(*grid, num_splits)](
        codes,
        row_scales,
        right,
        parts,
        num_tokens,
        width,
        ranks,
        right.stride(0),
        right.stride(1),
        per_program,
        tokens=tokens,
        inputs=_PROJECTED_INPUTS,
        tile_ranks=tile_ranks,
        num_stages=stages,
        num_warps=tokens // 16,
    )
    if num_splits > 1:
        _sum_splits_kernel[(triton.cdiv(out.numel(), 1024),)](parts, out, out.numel(), num_splits, block=1024)
    return out


def sum_products(
    codes: Tensor, row_scales: Tensor, left: Tensor, column_scales: Tensor | None, *, transposed: bool
) -> Tensor:
    """Return left^T @ rows or its transpose in fp32, as [parts, ranks, features] that are to be summed over the parts.

    The same tokens are always summed in the same order.
    """
    (num_tokens, width), ranks = codes.shape, left.shape[1]
    num_slots = _PROGRAMS_PER_SM * _count_multiprocessors(codes.device)
    tokens, features, tile_ranks = 64, 128, min(_MAX_RANKS, max(16, triton.next_power_of_2(ranks)))
    if _get_architecture() == 90:  # wider tiles would not fit into the registers elsewhere
        tile_ranks = 64  # what a warp group multiplies
        # Few tokens per program would write and read more partial sums than data.
        is_wide = num_tokens * triton.cdiv(width, 256) >= _MIN_SUMMED_TOKENS * num_slots
        tokens, features = (64, 256) if is_wide else (128, 64)
    grid = triton.cdiv(width, features), triton.cdiv(ranks, tile_ranks)
    num_splits = max(1, num_slots // (grid[0] * grid[1]))
    per_program = triton.cdiv(triton.cdiv(num_tokens, num_splits), tokens) * tokens
    num_splits = triton.cdiv(num_tokens, per_program)
    shape = (width, ranks) if transposed else (ranks, width)
    sums = left.new_empty(num_splits, *shape, dtype=torch.float32)
    _sum_products_kernel[(grid[0], num_splits, grid[1])](
        codes,
        row_scales,
        left,
        row_scales if column_scales is None else column_scales,
        sums,
        num_tokens,
        width,
        ranks,
        left.stride(0),
        per_program,
        tokens=tokens,
        features=features,
        tile_ranks=tile_ranks,
        divides=column_scales is not None,
        transposed=transposed,
        num_stages=3,
        num_warps=4,
    )
    return sums


def transpose(codes: Tensor) -> Tensor:
    """Return the transposed matrix, contiguous."""
    num_rows, num_columns = codes.shape
    target = codes.new_empty(num_columns, num_rows)
    grid = triton.cdiv(num_rows, _TRANSPOSED), triton.cdiv(num_columns, _TRANSPOSED)
    _transpose_kernel[grid](
        codes.view(torch.uint8), target.view(torch.uint8), num_rows, num_columns, tile=_TRANSPOSED, num_warps=4
    )
    return target


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether a tensor descriptor can load the matrix: rows begin at multiples of 16 bytes."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def _count_multiprocessors(device: torch.device) -> int:
    count: Any = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return int(count)


def _get_architecture() -> int:
    """Return the GPU's compute capability, 90 for 9.0, or 0 if kernels are interpreted."""
    return 0 if triton.knobs.runtime.interpret else int(triton.runtime.driver.active.get_current_target().arch)
