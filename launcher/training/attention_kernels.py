"""Attention over documents laid end to end, forward and backward, as three kernels.

Tiles lie on the tokens, not on the documents: their number does not depend on how many documents there are, so nothing
is spent on empty ones, and one recording serves every batch. The query heads that share a key head are rows of one
tile: keys are read once for all of them, and short documents waste little of a tile. Each gradient is the work of one
program, so that no two runs differ: kernels that add to gradients from many sides do.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _cap(scores, scale, softcap, caps: tl.constexpr):  # type: ignore[no-untyped-def]
    """Times log2(e): 2 ** score is then what exp makes of it."""
    if caps:
        ratio = 2.0 / (1.0 + tl.exp2(-2.8853900817779268 * scale / softcap * scores)) - 1.0  # tanh
        return ratio * (softcap * 1.4426950408889634)
    return scores * (scale * 1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _pass_cap(delta, capped, softcap, caps: tl.constexpr):  # type: ignore[no-untyped-def]
    """Times the cap's slope."""
    if caps:
        ratio = capped / (softcap * 1.4426950408889634)
        delta = delta * (1.0 - ratio * ratio)
    return delta


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(source, token, head, rows: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some tokens of the heads that share a key head. What lies beyond the tensor is zero."""
    return source.load([token, head, 0]).reshape([rows, size])


@triton.jit  # type: ignore[untyped-decorator]
def _find_rows(num_tokens, group: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each row's token and head within its tile, and whether there is one."""
    row = tl.arange(0, rows)
    tokens, heads = row // padded, row % padded
    return tokens, heads, (tokens < num_tokens) & (heads < group)


@triton.jit  # type: ignore[untyped-decorator]
def _find_tile(tile, num_tokens, group: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Its first and last token, and its rows."""
    first = tile * (rows // padded)
    last = tl.minimum(first + rows // padded, num_tokens) - 1
    behind, heads, is_row = _find_rows(num_tokens - first, group, padded, rows)
    return first, last, behind, heads, is_row


@triton.jit  # type: ignore[untyped-decorator]
def _find_lowest(starts, tokens, mask, window: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a token sees: its document's, or as far back as it looks."""
    lowest = tl.load(starts + tokens, mask=mask, other=0)
    if window > 0:
        lowest = tl.maximum(lowest, tokens - window + 1)
    return lowest


@triton.jit
def _is_seen(keys, tokens, lowest):  # type: ignore[no-untyped-def]
    """Neither before the lowest nor behind the token: one comparison, since what is negative is huge without a sign."""
    return (keys - lowest).to(tl.uint32, bitcast=True) <= (tokens - lowest).to(tl.uint32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _find_keys(starts, first, last, keys: tl.constexpr, window: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that a tile sees, and the one up to which whole blocks are seen by each of its tokens."""
    begin = _find_lowest(starts, first, True, window)
    whole = begin
    if _find_lowest(starts, last, True, window) == begin:
        whole = begin + (first + 1 - begin) // keys * keys
    return begin, whole


@triton.jit  # type: ignore[untyped-decorator]
def _forward_step(  # type: ignore[no-untyped-def]
    at, kv_head, q, total, norm, highest, key, value, tokens, lowest, scale, softcap, size: tl.constexpr,
    keys: tl.constexpr, caps: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    k = key.load([at, kv_head * size])
    scores = _cap(tl.dot(q, tl.trans(k)), scale, softcap, caps)
    if masked:
        places = at + tl.arange(0, keys)
        # Finite: the rows of a tile that have seen no key yet would be not-a-number. What they add up is forgotten.
        scores = tl.where(_is_seen(places[None, :], tokens[:, None], lowest[:, None]), scores, -1e30)
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    shares = tl.exp2(scores - new_highest[:, None])
    shrunk = tl.exp2(highest - new_highest)
    norm = norm * shrunk + tl.sum(shares, axis=1)
    v = value.load([at, kv_head * size])
    total = tl.dot(shares.to(v.dtype), v, total * shrunk[:, None])
    return total, norm, new_highest


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    query, key, value, out, log_sums, starts, num_tokens, num_kv_heads, scale, softcap, group: tl.constexpr,
    padded: tl.constexpr, size: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, window: tl.constexpr,
    caps: tl.constexpr,
):  # fmt: skip
    kv_head, tile = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    first, last, behind, heads, is_row = _find_tile(tile, num_tokens, group, padded, rows)
    tokens = first + behind
    lowest = _find_lowest(starts, tokens, is_row, window)
    begin, whole = _find_keys(starts, first, last, keys, window)
    q = _load_rows(query, first, kv_head * group, rows, size)
    total = tl.zeros([rows, size], tl.float32)
    norm = tl.zeros([rows], tl.float32)
    highest = tl.full([rows], -1e30, tl.float32)
    for at in range(begin, whole, keys):
        total, norm, highest = _forward_step(
            at, kv_head, q, total, norm, highest, key, value, tokens, lowest, scale, softcap, size, keys, caps, False
        )  # fmt: skip
    for at in range(whole, last + 1, keys):
        total, norm, highest = _forward_step(
            at, kv_head, q, total, norm, highest, key, value, tokens, lowest, scale, softcap, size, keys, caps, True
        )  # fmt: skip
    start = first.to(tl.int64) * num_kv_heads * group + kv_head * group
    of_row = behind * num_kv_heads * group + heads
    to = out + start * size + (of_row[:, None] * size + tl.arange(0, size)[None, :])
    tl.store(to, (total / norm[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    tl.store(log_sums + start + of_row, highest + tl.log2(norm), mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _query_step(  # type: ignore[no-untyped-def]
    at, kv_head, q, given, total, log_sum, along, key, value, tokens, lowest, scale, softcap, size: tl.constexpr,
    keys: tl.constexpr, caps: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    k = key.load([at, kv_head * size])
    v = value.load([at, kv_head * size])
    capped = _cap(tl.dot(q, tl.trans(k)), scale, softcap, caps)
    shares = tl.exp2(capped - log_sum[:, None])
    if masked:
        places = at + tl.arange(0, keys)
        shares = tl.where(_is_seen(places[None, :], tokens[:, None], lowest[:, None]), shares, 0.0)
    delta = _pass_cap(shares * (tl.dot(given, tl.trans(v)) - along[:, None]), capped, softcap, caps)
    return tl.dot(delta.to(k.dtype), k, total)


@triton.jit  # type: ignore[untyped-decorator]
def attend_back_queries(  # type: ignore[no-untyped-def]
    query, key, value, out, grad, log_sums, alongs, query_grad, starts, num_tokens, num_kv_heads, scale, softcap,
    group: tl.constexpr, padded: tl.constexpr, size: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    window: tl.constexpr, caps: tl.constexpr,
):  # fmt: skip
    """And, for the keys' gradients: how far each output lies along its own gradient."""
    kv_head, tile = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    first, last, behind, heads, is_row = _find_tile(tile, num_tokens, group, padded, rows)
    tokens = first + behind
    lowest = _find_lowest(starts, tokens, is_row, window)
    begin, whole = _find_keys(starts, first, last, keys, window)
    start = first.to(tl.int64) * num_kv_heads * group + kv_head * group
    of_row = behind * num_kv_heads * group + heads
    given = _load_rows(grad, first, kv_head * group, rows, size)
    output = _load_rows(out, first, kv_head * group, rows, size)
    along = tl.sum(given.to(tl.float32) * output.to(tl.float32), axis=1)
    tl.store(alongs + start + of_row, along, mask=is_row)
    log_sum = tl.load(log_sums + start + of_row, mask=is_row, other=0.0)
    q = _load_rows(query, first, kv_head * group, rows, size)
    total = tl.zeros([rows, size], tl.float32)
    for at in range(begin, whole, keys):
        total = _query_step(
            at, kv_head, q, given, total, log_sum, along, key, value, tokens, lowest, scale, softcap, size, keys, caps,
            False,
        )  # fmt: skip
    for at in range(whole, last + 1, keys):
        total = _query_step(
            at, kv_head, q, given, total, log_sum, along, key, value, tokens, lowest, scale, softcap, size, keys, caps,
            True,
        )  # fmt: skip
    to = query_grad + start * size + (of_row[:, None] * size + tl.arange(0, size)[None, :])
    tl.store(to, (total * scale).to(query_grad.dtype.element_ty), mask=is_row[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def attend_back_keys(  # type: ignore[no-untyped-def]
    query, key, value, grad, log_sums, alongs, key_grad, value_grad, starts, ends, num_tokens, num_kv_heads, scale,
    softcap, group: tl.constexpr, padded: tl.constexpr, size: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    window: tl.constexpr, caps: tl.constexpr,
):  # fmt: skip
    """One loop, every score masked: between two loops the products, which run on by themselves, are waited for."""
    kv_head, tile = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    first = tile * keys
    last = tl.minimum(first + keys, num_tokens) - 1
    end = tl.load(ends + last)
    if window > 0:
        end = tl.minimum(end, last + window)
    places = first + tl.arange(0, keys)
    k = key.load([first, kv_head * size])
    v = value.load([first, kv_head * size])
    key_total = tl.zeros([keys, size], tl.float32)
    value_total = tl.zeros([keys, size], tl.float32)
    for at in range(first, end, rows // padded):
        behind, heads, is_row = _find_rows(end - at, group, padded, rows)
        tokens = at + behind
        of_row = tl.cast(at, tl.int64) * num_kv_heads * group + kv_head * group + behind * num_kv_heads * group + heads
        q = _load_rows(query, at, kv_head * group, rows, size)
        given = _load_rows(grad, at, kv_head * group, rows, size)
        log_sum = tl.load(log_sums + of_row, mask=is_row, other=float("inf"))  # 2 ** -inf: the others have no share
        along = tl.load(alongs + of_row, mask=is_row, other=0.0)
        lowest = _find_lowest(starts, tokens, is_row, window)
        capped = _cap(tl.dot(k, tl.trans(q)), scale, softcap, caps)
        seen = _is_seen(places[:, None], tokens[None, :], lowest[None, :])
        shares = tl.where(seen, tl.exp2(capped - log_sum[None, :]), 0.0)
        value_total = tl.dot(shares.to(given.dtype), given, value_total)
        delta = _pass_cap(shares * (tl.dot(v, tl.trans(given)) - along[None, :]), capped, softcap, caps)
        key_total = tl.dot(delta.to(q.dtype), q, key_total)
    start = (first.to(tl.int64) * num_kv_heads + kv_head) * size
    to = start + (tl.arange(0, keys)[:, None] * num_kv_heads * size + tl.arange(0, size)[None, :])
    is_key = (places < num_tokens)[:, None]
    tl.store(key_grad + to, (key_total * scale).to(key_grad.dtype.element_ty), mask=is_key)
    tl.store(value_grad + to, value_total.to(value_grad.dtype.element_ty), mask=is_key)
