"""Triton kernels for causal attention over packed documents: forward, dQ, and dK/dV (FlashAttention-2's algorithm).

Tiles are laid over tokens, not over documents, so the grid does not depend on the number of documents: empty documents
cost nothing, and one CUDA graph serves every batch. The query heads that share a KV head (GQA) form the rows of one
tile: K and V are read once for all of them, and short documents waste little of a tile. Each gradient element is
written by one program, without atomics, so that results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _scale_and_softcap(qk, sm_scale, softcap, has_softcap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scaled and softcapped scores times log2(e), so that exp2 of the result is exp of the scores."""
    if has_softcap:
        ratio = 2.0 / (1.0 + tl.exp2(-2.8853900817779268 * sm_scale / softcap * qk)) - 1.0  # tanh
        return ratio * (softcap * 1.4426950408889634)
    return qk * (sm_scale * 1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _softcap_backward(ds, qk, softcap, has_softcap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply dS by the derivative of the softcap."""
    if has_softcap:
        ratio = qk / (softcap * 1.4426950408889634)
        ds = ds * (1.0 - ratio * ratio)
    return ds


@triton.jit  # type: ignore[untyped-decorator]
def _load_q_tile(q_desc, token, head, block_m: tl.constexpr, head_dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile of query rows, grouped by KV head; out-of-bounds rows are zero."""
    return q_desc.load([token, head, 0]).reshape([block_m, head_dim])


@triton.jit  # type: ignore[untyped-decorator]
def _tile_rows(  # type: ignore[no-untyped-def]
    num_tokens, group: tl.constexpr, padded_group: tl.constexpr, block_m: tl.constexpr
):
    """Return token and head of each row of a tile, and a mask of the rows that exist."""
    row = tl.arange(0, block_m)
    tokens, heads = row // padded_group, row % padded_group
    return tokens, heads, (tokens < num_tokens) & (heads < group)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_bounds(  # type: ignore[no-untyped-def]
    tile, num_tokens, group: tl.constexpr, padded_group: tl.constexpr, block_m: tl.constexpr
):
    """Return the first and last token of a tile, and the token offset, head and mask of each of its rows."""
    first = tile * (block_m // padded_group)
    last = tl.minimum(first + block_m // padded_group, num_tokens) - 1
    token_offsets, heads, row_mask = _tile_rows(num_tokens - first, group, padded_group, block_m)
    return first, last, token_offsets, heads, row_mask


@triton.jit  # type: ignore[untyped-decorator]
def _first_visible_key(doc_starts, tokens, mask, window: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first key visible to each token: the start of its document or of its sliding window."""
    first_key = tl.load(doc_starts + tokens, mask=mask, other=0)
    if window > 0:
        first_key = tl.maximum(first_key, tokens - window + 1)
    return first_key


@triton.jit
def _is_visible(keys, tokens, first_key):  # type: ignore[no-untyped-def]
    """Whether first_key <= key <= token, as one unsigned comparison."""
    return (keys - first_key).to(tl.uint32, bitcast=True) <= (tokens - first_key).to(tl.uint32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _key_range(doc_starts, first, last, block_n: tl.constexpr, window: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first key visible to a tile, and the end of the key blocks that need no mask."""
    key_begin = _first_visible_key(doc_starts, first, True, window)
    full_end = key_begin
    if _first_visible_key(doc_starts, last, True, window) == key_begin:
        full_end = key_begin + (first + 1 - key_begin) // block_n * block_n
    return key_begin, full_end


@triton.jit  # type: ignore[untyped-decorator]
def _attn_fwd_inner(  # type: ignore[no-untyped-def]
    start_n, kv_head, q, acc, l_i, m_i, k_desc, v_desc, tokens, first_key, sm_scale, softcap, head_dim: tl.constexpr,
    block_n: tl.constexpr, has_softcap: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    k = k_desc.load([start_n, kv_head * head_dim])
    qk = _scale_and_softcap(tl.dot(q, tl.trans(k)), sm_scale, softcap, has_softcap)
    if masked:
        offs_n = start_n + tl.arange(0, block_n)
        # Finite, because -inf would give NaN in rows without a visible key so far; alpha discards what they accumulate.
        qk = tl.where(_is_visible(offs_n[None, :], tokens[:, None], first_key[:, None]), qk, -1e30)
    m_ij = tl.maximum(m_i, tl.max(qk, axis=1))
    p = tl.exp2(qk - m_ij[:, None])
    alpha = tl.exp2(m_i - m_ij)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    v = v_desc.load([start_n, kv_head * head_dim])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, l_i, m_ij


@triton.jit  # type: ignore[untyped-decorator]
def attn_fwd(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, doc_starts, sinks_ptr, num_tokens, num_kv_heads, sm_scale, softcap,
    group: tl.constexpr, padded_group: tl.constexpr, head_dim: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, window: tl.constexpr, has_softcap: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """Store the output and, per row, lse = m + log2(l).

    A sink is the score of a key without a value: it only adds exp(sink) to the softmax denominator. The backward
    kernels need no sinks, because lse includes them.
    """
    kv_head, tile = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    first, last, token_offsets, heads, row_mask = _tile_bounds(tile, num_tokens, group, padded_group, block_m)
    tokens = first + token_offsets
    first_key = _first_visible_key(doc_starts, tokens, row_mask, window)
    key_begin, full_end = _key_range(doc_starts, first, last, block_n, window)
    q = _load_q_tile(q_desc, first, kv_head * group, block_m, head_dim)
    acc = tl.zeros([block_m, head_dim], tl.float32)
    l_i = tl.zeros([block_m], tl.float32)
    m_i = tl.full([block_m], -1e30, tl.float32)
    if has_sinks:
        m_i = tl.load(sinks_ptr + kv_head * group + heads, mask=row_mask, other=0.0).to(tl.float32) * 1.4426950408889634
        l_i += 1.0
    for start_n in range(key_begin, full_end, block_n):
        acc, l_i, m_i = _attn_fwd_inner(
            start_n, kv_head, q, acc, l_i, m_i, k_desc, v_desc, tokens, first_key, sm_scale, softcap, head_dim, block_n,
            has_softcap, False,
        )  # fmt: skip
    for start_n in range(full_end, last + 1, block_n):
        acc, l_i, m_i = _attn_fwd_inner(
            start_n, kv_head, q, acc, l_i, m_i, k_desc, v_desc, tokens, first_key, sm_scale, softcap, head_dim, block_n,
            has_softcap, True,
        )  # fmt: skip
    offset = first.to(tl.int64) * num_kv_heads * group + kv_head * group
    row_offsets = token_offsets * num_kv_heads * group + heads
    out_ptr = o_ptr + offset * head_dim + (row_offsets[:, None] * head_dim + tl.arange(0, head_dim)[None, :])
    tl.store(out_ptr, (acc / l_i[:, None]).to(o_ptr.dtype.element_ty), mask=row_mask[:, None])
    tl.store(lse_ptr + offset + row_offsets, m_i + tl.log2(l_i), mask=row_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _attn_bwd_dq_inner(  # type: ignore[no-untyped-def]
    start_n, kv_head, q, do, dq, lse, delta, k_desc, v_desc, tokens, first_key, sm_scale, softcap,
    head_dim: tl.constexpr, block_n: tl.constexpr, has_softcap: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    k = k_desc.load([start_n, kv_head * head_dim])
    v = v_desc.load([start_n, kv_head * head_dim])
    offs_n = start_n + tl.arange(0, block_n)
    if head_dim > 128:  # transposed: K and V are read from shared memory, where registers cannot hold Q and dO
        qk = _scale_and_softcap(tl.dot(k, tl.trans(q)), sm_scale, softcap, has_softcap)
        p = tl.exp2(qk - lse[None, :])
        if masked:
            p = tl.where(_is_visible(offs_n[:, None], tokens[None, :], first_key[None, :]), p, 0.0)
        ds = _softcap_backward(p * (tl.dot(v, tl.trans(do)) - delta[None, :]), qk, softcap, has_softcap)
        dq = tl.dot(tl.trans(k), ds.to(k.dtype), dq)
    else:
        qk = _scale_and_softcap(tl.dot(q, tl.trans(k)), sm_scale, softcap, has_softcap)
        p = tl.exp2(qk - lse[:, None])
        if masked:
            p = tl.where(_is_visible(offs_n[None, :], tokens[:, None], first_key[:, None]), p, 0.0)
        ds = _softcap_backward(p * (tl.dot(do, tl.trans(v)) - delta[:, None]), qk, softcap, has_softcap)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit  # type: ignore[untyped-decorator]
def attn_bwd_dq(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, o_desc, do_desc, lse_ptr, delta_ptr, dq_ptr, doc_starts, num_tokens, num_kv_heads,
    sm_scale, softcap, group: tl.constexpr, padded_group: tl.constexpr, head_dim: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, window: tl.constexpr, has_softcap: tl.constexpr,
):  # fmt: skip
    """Store dQ and delta = rowsum(dO * O), which the dK/dV kernel needs."""
    kv_head, tile = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    first, last, token_offsets, heads, row_mask = _tile_bounds(tile, num_tokens, group, padded_group, block_m)
    tokens = first + token_offsets
    first_key = _first_visible_key(doc_starts, tokens, row_mask, window)
    key_begin, full_end = _key_range(doc_starts, first, last, block_n, window)
    offset = first.to(tl.int64) * num_kv_heads * group + kv_head * group
    row_offsets = token_offsets * num_kv_heads * group + heads
    do = _load_q_tile(do_desc, first, kv_head * group, block_m, head_dim)
    o = _load_q_tile(o_desc, first, kv_head * group, block_m, head_dim)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
    tl.store(delta_ptr + offset + row_offsets, delta, mask=row_mask)
    lse = tl.load(lse_ptr + offset + row_offsets, mask=row_mask, other=0.0)
    q = _load_q_tile(q_desc, first, kv_head * group, block_m, head_dim)
    dq = tl.zeros([head_dim, block_m] if head_dim > 128 else [block_m, head_dim], tl.float32)
    for start_n in range(key_begin, full_end, block_n):
        dq = _attn_bwd_dq_inner(
            start_n, kv_head, q, do, dq, lse, delta, k_desc, v_desc, tokens, first_key, sm_scale, softcap, head_dim,
            block_n, has_softcap, False,
        )  # fmt: skip
    for start_n in range(full_end, last + 1, block_n):
        dq = _attn_bwd_dq_inner(
            start_n, kv_head, q, do, dq, lse, delta, k_desc, v_desc, tokens, first_key, sm_scale, softcap, head_dim,
            block_n, has_softcap, True,
        )  # fmt: skip
    if head_dim > 128:
        dq = tl.trans(dq)
    out_ptr = dq_ptr + offset * head_dim + (row_offsets[:, None] * head_dim + tl.arange(0, head_dim)[None, :])
    tl.store(out_ptr, (dq * sm_scale).to(dq_ptr.dtype.element_ty), mask=row_mask[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def attn_bwd_dkdv(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, doc_starts, doc_ends, num_tokens,
    num_kv_heads, sm_scale, softcap, group: tl.constexpr, padded_group: tl.constexpr, head_dim: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, window: tl.constexpr, has_softcap: tl.constexpr,
):  # fmt: skip
    """Store dK and dV. One loop masks all scores: a second loop without masks would wait for asynchronous dots."""
    kv_head, tile = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    first = tile * block_n
    last = tl.minimum(first + block_n, num_tokens) - 1
    q_end = tl.load(doc_ends + last)
    if window > 0:
        q_end = tl.minimum(q_end, last + window)
    offs_n = first + tl.arange(0, block_n)
    k = k_desc.load([first, kv_head * head_dim])
    v = v_desc.load([first, kv_head * head_dim])
    dk = tl.zeros([block_n, head_dim], tl.float32)
    dv = tl.zeros([block_n, head_dim], tl.float32)
    for start_m in range(first, q_end, block_m // padded_group):
        token_offsets, heads, row_mask = _tile_rows(q_end - start_m, group, padded_group, block_m)
        tokens = start_m + token_offsets
        row_offsets = (
            tl.cast(start_m, tl.int64) * num_kv_heads * group
            + kv_head * group
            + token_offsets * num_kv_heads * group
            + heads
        )
        q = _load_q_tile(q_desc, start_m, kv_head * group, block_m, head_dim)
        do = _load_q_tile(do_desc, start_m, kv_head * group, block_m, head_dim)
        lse = tl.load(lse_ptr + row_offsets, mask=row_mask, other=float("inf"))  # exp2(-inf) = 0 for masked rows
        delta = tl.load(delta_ptr + row_offsets, mask=row_mask, other=0.0)
        first_key = _first_visible_key(doc_starts, tokens, row_mask, window)
        qk = _scale_and_softcap(tl.dot(k, tl.trans(q)), sm_scale, softcap, has_softcap)
        visible = _is_visible(offs_n[:, None], tokens[None, :], first_key[None, :])
        p = tl.where(visible, tl.exp2(qk - lse[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = _softcap_backward(p * (tl.dot(v, tl.trans(do)) - delta[None, :]), qk, softcap, has_softcap)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    offset = (first.to(tl.int64) * num_kv_heads + kv_head) * head_dim
    out_offsets = offset + (tl.arange(0, block_n)[:, None] * num_kv_heads * head_dim + tl.arange(0, head_dim)[None, :])
    key_mask = (offs_n < num_tokens)[:, None]
    tl.store(dk_ptr + out_offsets, (dk * sm_scale).to(dk_ptr.dtype.element_ty), mask=key_mask)
    tl.store(dv_ptr + out_offsets, dv.to(dv_ptr.dtype.element_ty), mask=key_mask)
