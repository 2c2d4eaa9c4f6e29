"""Attention of one new token per row over a KV cache: Flash-Decoding, with the cache split over many programs.

SDPA repeats keys and values for grouped heads, reads the whole cache, and uses one program per head. Here a program
reads a part of a row's visible tokens once for all query heads that share a KV head; a second kernel combines the
parts. Symbols: Q [batch, heads, 1, head_dim], K and V [batch, kv_heads, length, head_dim], mask [batch, length].
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK_N, _MIN_BLOCK_N = 64, 16
_TILE_BYTES = 16384  # of keys or values: a consumer GPU has 99 KiB of shared memory for two tiles of each
_MIN_GROUP = 16  # rows of tl.dot
_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 32
_MASK_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _split_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    mask,
    acc,
    stats,
    length,
    sm_scale,
    stride_q,
    stride_k,
    stride_v,
    stride_mask,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    num_splits: tl.constexpr,
    block_n: tl.constexpr,
    mask_block: tl.constexpr,
):
    batch, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    mask += batch * stride_mask
    first, end = length, 0  # of the visible tokens
    for start in range(0, length, mask_block):
        index = start + tl.arange(0, mask_block)
        visible = tl.load(mask + index, mask=index < length, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(visible, index, length)))
        end = tl.maximum(end, tl.max(tl.where(visible, index + 1, 0)))
    part = tl.cdiv(tl.cdiv(end - first, num_splits), block_n) * block_n
    begin = first + split * part
    end = tl.minimum(end, begin + part)

    dim, row = tl.arange(0, padded_dim), tl.arange(0, padded_group)
    query_head = head * group + row
    is_row, is_dim = row < group, dim < head_dim
    is_query = is_row[:, None] & is_dim[None, :]
    q_tile = tl.load(q + batch * stride_q + query_head[:, None] * head_dim + dim[None, :], mask=is_query, other=0.0)
    k += batch * stride_k + head * length * head_dim
    v += batch * stride_v + head * length * head_dim
    largest = tl.full([padded_group], float("-inf"), tl.float32)
    total = tl.zeros([padded_group], tl.float32)
    output = tl.zeros([padded_group, padded_dim], tl.float32)
    for start in range(begin, end, block_n):
        index = start + tl.arange(0, block_n)
        inside = index < end
        tile = index[:, None] * head_dim + dim[None, :]
        is_key = inside[:, None] & is_dim[None, :]
        k_tile = tl.load(k + tile, mask=is_key, other=0.0)
        visible = inside & (tl.load(mask + index, mask=inside, other=0) != 0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (sm_scale * 1.4426950408889634)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # no token of this part is visible yet
        p = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(largest - shift)
        v_tile = tl.load(v + tile, mask=is_key, other=0.0)
        output = output * decay[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        total = total * decay + tl.sum(p, 1)
        largest = new_largest

    item = (batch * num_kv_heads * group + query_head) * num_splits + split
    tl.store(acc + item[:, None] * head_dim + dim[None, :], output, mask=is_query)
    tl.store(stats + item * 2, largest, mask=is_row)
    tl.store(stats + item * 2 + 1, total, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    acc,
    stats,
    o,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    num_splits: tl.constexpr,
    padded_splits: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, padded_splits), tl.arange(0, padded_dim)
    is_split, is_dim = split < num_splits, dim < head_dim
    parts = item * num_splits + split
    largest = tl.load(stats + parts * 2, mask=is_split, other=float("-inf"))
    total = tl.load(stats + parts * 2 + 1, mask=is_split, other=0.0)
    weight = tl.exp2(largest - tl.max(largest, 0))
    tile = parts[:, None] * head_dim + dim[None, :]
    output = tl.load(acc + tile, mask=is_split[:, None] & is_dim[None, :], other=0.0)
    output = tl.sum(output * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(o + item * head_dim + dim, output.to(o.dtype.element_ty), mask=is_dim)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sm_scale: float | None = None) -> Tensor:
    """Return the attention of one new token per row over its KV cache.

    The result is [batch, 1, heads, head_dim]. `mask` is true for visible tokens; each row needs at least one.
    """
    batch, num_heads, _, head_dim = q.shape
    num_kv_heads, length = k.shape[1:3]
    group = num_heads // num_kv_heads
    num_splits = _count_splits(batch * num_kv_heads, length, q.device)
    q, k, v, mask = q.contiguous(), _make_dense(k), _make_dense(v), mask.contiguous().view(torch.uint8)
    acc = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((batch, num_heads, num_splits, 2), dtype=torch.float32, device=q.device)
    o = torch.empty((batch, 1, num_heads, head_dim), dtype=q.dtype, device=q.device)
    padded_dim = triton.next_power_of_2(head_dim)
    _split_kernel[(batch, num_kv_heads, num_splits)](
        q,
        k,
        v,
        mask,
        acc,
        stats,
        length,
        1 / math.sqrt(head_dim) if sm_scale is None else sm_scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        mask.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        padded_group=max(_MIN_GROUP, triton.next_power_of_2(group)),
        head_dim=head_dim,
        padded_dim=padded_dim,
        num_splits=num_splits,
        block_n=max(_MIN_BLOCK_N, min(_MAX_BLOCK_N, _TILE_BYTES // (padded_dim * k.element_size()))),
        mask_block=_MASK_BLOCK,
        num_stages=2,
    )
    _combine_kernel[(batch * num_heads,)](
        acc,
        stats,
        o,
        head_dim=head_dim,
        padded_dim=padded_dim,
        num_splits=num_splits,
        padded_splits=triton.next_power_of_2(num_splits),
    )
    return o


def _make_dense(tensor: Tensor) -> Tensor:
    """Return K or V, copied only if the keys or values of a row are not contiguous."""
    _, _, length, head_dim = tensor.shape
    return tensor if tensor.stride()[1:] == (length * head_dim, head_dim, 1) else tensor.contiguous()


def _count_splits(num_rows: int, length: int, device: torch.device) -> int:
    """Return the number of parts to split a row's KV cache into, so that each multiprocessor gets a few programs."""
    num_splits = triton.cdiv(_PROGRAMS_PER_SM * _count_multiprocessors(device), num_rows)
    return max(1, min(num_splits, _MAX_SPLITS, length // _MAX_BLOCK_N))


@cache
def _count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
