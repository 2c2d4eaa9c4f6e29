"""What a decoder layer does beside its products, as one pass over memory each: heads turned by their positions, behind
their norm; the MLP's gate. And the same backward, straight into the tensor that the next product reads.

States are scaled where DoRA does so; where it drops, too, another product is added to them (`rest`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Grids are one-dimensional: only their first dimension may be larger than 65,535.
_ROWS = 32  # tokens of a program
_COLUMNS = 128  # of the MLP's
_WARPS = 4
_SUMMED = 16, 8  # tokens at a time, and how often, where a program adds up over tokens

Rests = tuple[Tensor, Tensor]  # what is added to the scaled states, and room for its gradient


@triton.jit  # type: ignore[untyped-decorator]
def _load_halves(here, mask, half: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(here + half, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def _load_norm(query_norm, key_norm, is_query, columns, half: tl.constexpr):  # type: ignore[no-untyped-def]
    if is_query:
        first = tl.load(query_norm + columns).to(tl.float32)
        second = tl.load(query_norm + half + columns).to(tl.float32)
    else:
        first = tl.load(key_norm + columns).to(tl.float32)
        second = tl.load(key_norm + half + columns).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    states, rest, scales, query_norm, key_norm, cos, sin, query, key, value, num_tokens, num_columns, row_stride, eps,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, half: tl.constexpr, rows: tl.constexpr,
    norms: tl.constexpr, scaled: tl.constexpr, added: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0) % num_columns, tl.program_id(0) // num_columns
    tokens = part * rows + tl.arange(0, rows)
    columns = tl.arange(0, half)
    mask = (tokens < num_tokens)[:, None]
    tokens = tokens.to(tl.int64)[:, None]
    at_head = head * 2 * half + columns
    first, second = _load_halves(states + tokens * row_stride + at_head[None, :], mask, half)
    if scaled:
        first *= tl.load(scales + at_head)[None, :]
        second *= tl.load(scales + at_head + half)[None, :]
    if added:
        more_first, more_second = _load_halves(rest + tokens * row_stride + at_head[None, :], mask, half)
        first += more_first
        second += more_second
    if head < num_heads + num_kv_heads:
        if norms:
            mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * half)
            inverse = (1.0 / tl.sqrt(mean + eps))[:, None]
            of_first, of_second = _load_norm(query_norm, key_norm, head < num_heads, columns, half)
            first = first * inverse * of_first
            second = second * inverse * of_second
        angle = tokens * 2 * half + columns[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    if head < num_heads:
        to = query + (tokens * num_heads + head) * 2 * half + columns[None, :]
    elif head < num_heads + num_kv_heads:
        to = key + (tokens * num_kv_heads + (head - num_heads)) * 2 * half + columns[None, :]
    else:
        to = value + (tokens * num_kv_heads + (head - num_heads - num_kv_heads)) * 2 * half + columns[None, :]
    tl.store(to, first.to(query.dtype.element_ty), mask=mask)
    tl.store(to + half, second.to(query.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_back(first, second, x, y, eps, half: tl.constexpr):  # type: ignore[no-untyped-def]
    mean = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / (2 * half)
    inverse = (1.0 / tl.sqrt(mean + eps))[:, None]
    x, y = x * inverse, y * inverse
    along = ((tl.sum(first * x, axis=1) + tl.sum(second * y, axis=1)) / (2 * half))[:, None]
    return inverse * (first - x * along), inverse * (second - y * along)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_back(  # type: ignore[no-untyped-def]
    query_grad, key_grad, value_grad, states, rest, rest_grad, scales, query_norm, key_norm, cos, sin, wide, sums,
    num_tokens, num_columns, row_stride, wide_stride, eps, num_heads: tl.constexpr, num_kv_heads: tl.constexpr,
    half: tl.constexpr, rows: tl.constexpr, steps: tl.constexpr, norms: tl.constexpr, scaled: tl.constexpr,
    added: tl.constexpr,
):  # fmt: skip
    """One head of some tokens, `rows` at a time."""
    head, part = tl.program_id(0) % num_columns, tl.program_id(0) // num_columns
    columns = tl.arange(0, half)
    at_head = head * 2 * half + columns
    first_sum = tl.zeros([rows, half], tl.float32)
    second_sum = tl.zeros([rows, half], tl.float32)
    for step in range(steps):
        tokens = (part * steps + step) * rows + tl.arange(0, rows)
        mask = (tokens < num_tokens)[:, None]
        tokens = tokens.to(tl.int64)[:, None]
        if head < num_heads:
            given = query_grad + (tokens * num_heads + head) * 2 * half
        elif head < num_heads + num_kv_heads:
            given = key_grad + (tokens * num_kv_heads + (head - num_heads)) * 2 * half
        else:
            given = value_grad + (tokens * num_kv_heads + (head - num_heads - num_kv_heads)) * 2 * half
        first, second = _load_halves(given + columns[None, :], mask, half)
        if scaled or norms:
            of_first, of_second = _load_halves(states + tokens * row_stride + at_head[None, :], mask, half)
        if scaled:
            first_scale = tl.load(scales + at_head)[None, :]
            second_scale = tl.load(scales + at_head + half)[None, :]
        if head < num_heads + num_kv_heads:
            angle = tokens * 2 * half + columns[None, :]
            c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
            turned = first * c + second * s
            second = second * c - first * s
            first = turned
            if norms:
                x, y = of_first, of_second
                if scaled:
                    x, y = x * first_scale, y * second_scale
                if added:
                    more_x, more_y = _load_halves(rest + tokens * row_stride + at_head[None, :], mask, half)
                    x, y = x + more_x, y + more_y
                first_norm, second_norm = _load_norm(query_norm, key_norm, head < num_heads, columns, half)
                first, second = _norm_back(first * first_norm, second * second_norm, x, y, eps, half)
        if added:
            to_rest = rest_grad + tokens * row_stride + at_head[None, :]
            tl.store(to_rest, first.to(wide.dtype.element_ty), mask=mask)
            tl.store(to_rest + half, second.to(wide.dtype.element_ty), mask=mask)
        if scaled:
            first_sum += first * of_first
            second_sum += second * of_second
            first *= first_scale
            second *= second_scale
        to = wide + tokens * wide_stride + at_head[None, :]
        tl.store(to, first.to(wide.dtype.element_ty), mask=mask)
        tl.store(to + half, second.to(wide.dtype.element_ty), mask=mask)
    if scaled:
        to_sum = sums + part.to(tl.int64) * (num_heads + 2 * num_kv_heads) * 2 * half + at_head
        tl.store(to_sum, tl.sum(first_sum, axis=0))
        tl.store(to_sum + half, tl.sum(second_sum, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    states, rest, scales, out, num_tokens, num_columns, width, row_stride, rest_stride, out_stride, rows: tl.constexpr,
    block: tl.constexpr, scaled: tl.constexpr, added: tl.constexpr,
):  # fmt: skip
    """`added`: to none of a token's two halves, to the ups, to both."""
    column, part = tl.program_id(0) % num_columns, tl.program_id(0) // num_columns
    columns = column * block + tl.arange(0, block)
    tokens = part * rows + tl.arange(0, rows)
    inside = columns < width
    mask = (tokens < num_tokens)[:, None] & inside[None, :]
    tokens = tokens.to(tl.int64)[:, None]
    here = states + tokens * row_stride + columns[None, :]
    gate = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(here + width, mask=mask, other=0.0).to(tl.float32)
    if scaled:
        gate *= tl.load(scales + columns, mask=inside, other=0.0)[None, :]
        up *= tl.load(scales + width + columns, mask=inside, other=0.0)[None, :]
    if added:
        more = rest + tokens * rest_stride + columns[None, :]
        if added == 2:
            gate += tl.load(more, mask=mask, other=0.0).to(tl.float32)
            more += width
        up += tl.load(more, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + tokens * out_stride + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_back(  # type: ignore[no-untyped-def]
    grad, states, rest, rest_grad, scales, wide, sums, num_tokens, num_columns, width, row_stride, rest_stride,
    wide_stride, rows: tl.constexpr, steps: tl.constexpr, block: tl.constexpr, scaled: tl.constexpr,
    added: tl.constexpr,
):  # fmt: skip
    column, part = tl.program_id(0) % num_columns, tl.program_id(0) // num_columns
    columns = column * block + tl.arange(0, block)
    inside = columns < width
    gate_sum = tl.zeros([rows, block], tl.float32)
    up_sum = tl.zeros([rows, block], tl.float32)
    for step in range(steps):
        tokens = (part * steps + step) * rows + tl.arange(0, rows)
        mask = (tokens < num_tokens)[:, None] & inside[None, :]
        tokens = tokens.to(tl.int64)[:, None]
        here = states + tokens * row_stride + columns[None, :]
        given = grad + tokens * width + columns[None, :]
        gate = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(here + width, mask=mask, other=0.0).to(tl.float32)
        delta = tl.load(given, mask=mask, other=0.0).to(tl.float32)
        plain_gate, plain_up = gate, up
        if scaled:
            gate_scale = tl.load(scales + columns, mask=inside, other=0.0)[None, :]
            up_scale = tl.load(scales + width + columns, mask=inside, other=0.0)[None, :]
            gate, up = gate * gate_scale, up * up_scale
        if added:
            more = rest + tokens * rest_stride + columns[None, :]
            if added == 2:
                gate += tl.load(more, mask=mask, other=0.0).to(tl.float32)
                more += width
            up += tl.load(more, mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        tl.store(given, (silu * up).to(grad.dtype.element_ty), mask=mask)
        up_grad = delta * silu
        gate_grad = delta * up * (sigmoid + silu * (1.0 - sigmoid))
        if added:
            to_rest = rest_grad + tokens * rest_stride + columns[None, :]
            if added == 2:
                tl.store(to_rest, gate_grad.to(wide.dtype.element_ty), mask=mask)
                to_rest += width
            tl.store(to_rest, up_grad.to(wide.dtype.element_ty), mask=mask)
        if scaled:
            gate_sum += gate_grad * plain_gate
            up_sum += up_grad * plain_up
            gate_grad, up_grad = gate_grad * gate_scale, up_grad * up_scale
        to = wide + tokens * wide_stride + columns[None, :]
        tl.store(to, gate_grad.to(wide.dtype.element_ty), mask=mask)
        tl.store(to + width, up_grad.to(wide.dtype.element_ty), mask=mask)
    if scaled:
        to_sum = sums + part.to(tl.int64) * 2 * width + columns
        tl.store(to_sum, tl.sum(gate_sum, axis=0), mask=inside)
        tl.store(to_sum + width, tl.sum(up_sum, axis=0), mask=inside)


def turn(
    states: Tensor,
    scales: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    outputs: tuple[Tensor, Tensor, Tensor | None],
    rest: Tensor | None = None,
) -> None:
    query, key, value = outputs
    num_tokens, num_heads, size = query.shape
    count = num_heads + (1 if value is None else 2) * key.shape[1]
    query_norm, key_norm = (cos, cos) if norms is None else norms  # never read then
    _turn[(count * triton.cdiv(num_tokens, _ROWS),)](
        states,
        states if rest is None else rest,
        cos if scales is None else scales,
        query_norm,
        key_norm,
        cos,
        sin,
        query,
        key,
        key if value is None else value,
        num_tokens,
        count,
        states.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        half=size // 2,
        rows=_ROWS,
        norms=norms is not None,
        scaled=scales is not None,
        added=rest is not None,
        num_warps=_WARPS,
    )


def turn_back(
    grads: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    scales: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    wide: Tensor,
    rests: Rests | None = None,
) -> Tensor | None:
    """Into `wide`; the gradient of the scales, where there are any."""
    rest, rest_grad = (wide, wide) if rests is None else rests
    query_grad, key_grad, value_grad = grads
    num_tokens, num_heads, size = query_grad.shape
    rows, steps = _SUMMED if scales is not None else (_ROWS, 1)
    num_programs = triton.cdiv(num_tokens, rows * steps)
    count = num_heads + 2 * key_grad.shape[1]
    sums = None if scales is None else torch.empty(num_programs, count * size, device=wide.device)
    query_norm, key_norm = (cos, cos) if norms is None else norms
    _turn_back[(count * num_programs,)](
        query_grad,
        key_grad,
        value_grad,
        states,
        rest,
        rest_grad,
        cos if scales is None else scales,
        query_norm,
        key_norm,
        cos,
        sin,
        wide,
        cos if sums is None else sums,
        num_tokens,
        count,
        states.stride(0),
        wide.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=key_grad.shape[1],
        half=size // 2,
        rows=rows,
        steps=steps,
        norms=norms is not None,
        scaled=scales is not None,
        added=rests is not None,
        num_warps=_WARPS,
    )
    return None if sums is None else sums.sum(0)


def gate(states: Tensor, scales: Tensor | None, out: Tensor, rest: Tensor | None = None) -> None:
    num_tokens, width = len(states), states.shape[1] // 2
    num_columns = triton.cdiv(width, _COLUMNS)
    _gate[(num_columns * triton.cdiv(num_tokens, _ROWS),)](
        states,
        states if rest is None else rest,
        out if scales is None else scales,
        out,
        num_tokens,
        num_columns,
        width,
        states.stride(0),
        0 if rest is None else rest.stride(0),
        out.stride(0),
        rows=_ROWS,
        block=_COLUMNS,
        scaled=scales is not None,
        added=0 if rest is None else rest.shape[1] // width,
        num_warps=_WARPS,
    )


def gate_back(
    grad: Tensor, states: Tensor, scales: Tensor | None, wide: Tensor, rests: Rests | None = None
) -> Tensor | None:
    """Into `wide`; what the gate let through takes the gradient's place. The gradient of the scales."""
    rest, rest_grad = (wide, wide) if rests is None else rests
    num_tokens, width = len(states), states.shape[1] // 2
    rows, steps = _SUMMED if scales is not None else (_ROWS, 1)
    num_programs = triton.cdiv(num_tokens, rows * steps)
    sums = None if scales is None else torch.empty(num_programs, 2 * width, device=wide.device)
    num_columns = triton.cdiv(width, _COLUMNS)
    _gate_back[(num_columns * num_programs,)](
        grad,
        states,
        rest,
        rest_grad,
        grad if scales is None else scales,
        wide,
        grad if sums is None else sums,
        num_tokens,
        num_columns,
        width,
        states.stride(0),
        rest.stride(0),
        wide.stride(0),
        rows=rows,
        steps=steps,
        block=_COLUMNS,
        scaled=scales is not None,
        added=0 if rests is None else rest.shape[1] // width,
        num_warps=_WARPS,
    )
    return None if sums is None else sums.sum(0)
