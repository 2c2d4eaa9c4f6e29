"""A half of a decoder layer, forward and backward, as an operation that torch.compile passes on whole.

Norm, products and what lies between them: each writes straight into the tensor that the next product reads, LoRA's
columns beside it, and what can be computed again is not kept. Blocks are those of products.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.training.layer_passes import (
    copies_values,
    copy,
    gate,
    gate_back,
    keeps_states,
    norm,
    norm_back,
    take_apart,
    turn,
    turn_back,
    widened,
)

BlockShape = tuple[tuple[int, ...], float, int]  # sizes of its matrices, LoRA's scale and rank


def _multiply(residual: Tensor, norm_weight: Tensor, eps: float, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """x is what a norm makes of the residual stream: [x, xA'], and its product with [W, sB]'."""
    num_in = residual.shape[1]
    num_out = len(matrix) - (matrix.shape[1] - num_in)
    wide = matrix.new_empty(len(residual), matrix.shape[1])
    norm(residual, norm_weight, eps, wide)
    torch.mm(wide[:, :num_in], matrix[num_out:, :num_in].t(), out=wide[:, num_in:])
    return wide, wide @ matrix[:num_out].t()


def _norm_back(grad: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain torch: the compiler joins it with the sum that follows."""
    return norm_back(grad.float(), residual.float(), weight, eps).to(residual.dtype)


def _go_back(
    grad: Tensor, wide: Tensor, matrix: Tensor, num_in: int, wants_input: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """grad = [dy, room for dy sB]. Gradients of x, of all A, and of all B: those lie on the diagonal of the last.

    Off it B is zero: dy is read once for all matrices, not once for each.
    """
    num_out = grad.shape[1] - (wide.shape[1] - num_in)
    torch.mm(grad[:, :num_out], matrix[:num_out, num_in:], out=grad[:, num_out:])
    ups = grad[:, :num_out].t() @ wide[:, num_in:]
    downs = grad[:, num_out:].t() @ wide[:, :num_in]
    return grad @ matrix[:, :num_in] if wants_input else grad.new_empty(0), downs, ups


@torch.library.custom_op("launcher::heads", mutates_args=())
def _heads(
    residual: Tensor,
    norm_weight: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide, states = _multiply(residual, norm_weight, eps, matrix)
    norms = _pair(query_norm, key_norm)
    query, key, value = turn(states, scales, norms, cos, sin, eps, num_heads, num_kv_heads)
    kept = states if keeps_states(scales, norms) else states.new_empty(0)
    return wide, kept, query, key, states.new_empty(0) if value is None else value


@_heads.register_fake
def _(
    x: Tensor, _norm_weight: Tensor, matrix: Tensor, scales: Tensor | None, *more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query_norm, key_norm, cos, _sin, _eps, num_heads, num_kv_heads = more
    norms, num_tokens, size = _pair(query_norm, key_norm), len(x), cos.shape[1]
    key = matrix.new_empty(num_tokens, num_kv_heads, size)
    num_states = (num_heads + 2 * num_kv_heads) * size
    return (
        matrix.new_empty(num_tokens, matrix.shape[1]),
        matrix.new_empty(num_tokens, num_states) if keeps_states(scales, norms) else matrix.new_empty(0),
        matrix.new_empty(num_tokens, num_heads, size),
        key,
        torch.empty_like(key) if copies_values(scales, norms) else matrix.new_empty(0),
    )


@torch.library.custom_op("launcher::heads_back", mutates_args=())
def _heads_back(
    query_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    wide: Tensor,
    states: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    sizes: list[int],
    scale: float,
    rank: int,
    wants_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads, norms = (query_grad, key_grad, value_grad), _pair(query_norm, key_norm)
    grad = wide.new_empty(len(wide), len(matrix))
    of_scales = turn_back(grads, states, scales, norms, cos, sin, eps, grad)
    x_grad, downs, ups = _go_back(grad, wide, matrix, matrix.shape[1] - (len(matrix) - sum(sizes)), wants_input)
    trained = take_apart(downs, ups, sizes, scale, rank)
    return x_grad, *trained, wide.new_empty(0) if of_scales is None else of_scales


@_heads_back.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide, _states, matrix, scales = arguments[3:7]
    sizes, _scale, rank, wants_input = arguments[-4:]
    num_in = matrix.shape[1] - (len(matrix) - sum(sizes))
    return (
        wide.new_empty(len(wide), num_in) if wants_input else wide.new_empty(0),
        *_empty_pair(wide, sizes, rank, num_in),
        wide.new_empty(0) if scales is None else torch.empty_like(scales),
    )


def _empty_pair(like: Tensor, sizes: list[int], rank: int, num_in: int) -> tuple[Tensor, Tensor]:
    """Of take_apart."""
    dtype = widened(like.dtype)
    return like.new_empty(rank * len(sizes), num_in, dtype=dtype), like.new_empty(sum(sizes), rank, dtype=dtype)


@torch.library.custom_op("launcher::mlp", mutates_args=())
def _mlp(
    residual: Tensor, norm_weight: Tensor, gates: Tensor, down: Tensor, scales: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide, states = _multiply(residual, norm_weight, eps, gates)
    num_in = states.shape[1] // 2
    num_out = len(down) - (down.shape[1] - num_in)
    through = states.new_empty(len(states), down.shape[1])
    gate(states, scales, through)
    torch.mm(through[:, :num_in], down[num_out:, :num_in].t(), out=through[:, num_in:])
    return through @ down[:num_out].t(), wide, states, through[:, num_in:].contiguous()


@_mlp.register_fake
def _(
    residual: Tensor, _norm_weight: Tensor, gates: Tensor, down: Tensor, *_more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_in = residual.shape
    num_states = len(gates) - (gates.shape[1] - num_in)
    ranks = down.shape[1] - num_states // 2
    return (
        gates.new_empty(num_tokens, len(down) - ranks),
        gates.new_empty(num_tokens, gates.shape[1]),
        gates.new_empty(num_tokens, num_states),
        gates.new_empty(num_tokens, ranks),
    )


@torch.library.custom_op("launcher::mlp_back", mutates_args=())
def _mlp_back(
    y_grad: Tensor,
    wide: Tensor,
    states: Tensor,
    narrow: Tensor,
    gates: Tensor,
    down: Tensor,
    scales: Tensor | None,
    lora_scales: list[float],
    ranks: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_out = y_grad.shape
    num_in = states.shape[1] // 2
    grad = states.new_empty(num_tokens, len(down))
    copy(y_grad, grad)
    torch.mm(y_grad, down[:num_out, num_in:], out=grad[:, num_out:])
    up = y_grad.t() @ narrow
    through = grad @ down[:, :num_in]
    states_grad = states.new_empty(num_tokens, len(gates))
    of_scales = gate_back(through, states, scales, states_grad)
    last = take_apart(grad[:, num_out:].t() @ through, up, [num_out], lora_scales[1], ranks[1])
    del grad, through
    x_grad, downs, ups = _go_back(states_grad, wide, gates, gates.shape[1] - (len(gates) - states.shape[1]))
    first = take_apart(downs, ups, [num_in, num_in], lora_scales[0], ranks[0])
    return x_grad, *first, *last, states.new_empty(0) if of_scales is None else of_scales


@_mlp_back.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    y_grad, wide, states, _narrow, gates, _down, scales, _lora_scales, ranks = arguments
    num_in, middle = gates.shape[1] - (len(gates) - states.shape[1]), states.shape[1] // 2
    return (
        wide.new_empty(len(wide), num_in),
        *_empty_pair(wide, [middle, middle], ranks[0], num_in),
        *_empty_pair(wide, [y_grad.shape[1]], ranks[1], middle),
        wide.new_empty(0) if scales is None else torch.empty_like(scales),
    )


def _pair(query_norm: Tensor | None, key_norm: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if query_norm is None or key_norm is None else (query_norm, key_norm)


def _split(downs: Tensor, ups: Tensor, sizes: tuple[int, ...], rank: int) -> list[Tensor]:
    """Of each A, then of each B, as those of a block are given to the operations."""
    return [*downs.split(rank), *ups.split(list(sizes))]


class Heads(torch.autograd.Function):
    """The residual stream [tokens, in], behind a norm -> queries, keys, values [tokens, heads, size]."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        scales: Tensor | None,
        norm_weight: Tensor,
        matrix: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        angles: tuple[Tensor, Tensor],
        eps: float,
        counts: tuple[int, int],
        block: BlockShape,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_norm, key_norm = (None, None) if norms is None else norms
        wide, states, query, key, value = _heads(
            residual, norm_weight, matrix, scales, query_norm, key_norm, *angles, eps, *counts
        )
        if not copies_values(scales, norms):
            value = states[:, -counts[1] * query.shape[2] :].unflatten(1, (counts[1], query.shape[2]))
        ctx.save_for_backward(residual, norm_weight, wide, states, matrix, scales, query_norm, key_norm, *angles)
        ctx.eps, ctx.block, ctx.dtypes = eps, block, tuple(tensor.dtype for tensor in trained)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        given = (grad.contiguous() for grad in grads)
        wants_input = ctx.needs_input_grad[0]
        residual, norm_weight, *saved = ctx.saved_tensors
        sizes, scale, rank = ctx.block
        x_grad, downs, ups, of_scales = _heads_back(*given, *saved, ctx.eps, list(sizes), scale, rank, wants_input)
        trained = _split(downs, ups, sizes, rank)
        return (
            _norm_back(x_grad, residual, norm_weight, ctx.eps) if wants_input else None,
            of_scales if ctx.needs_input_grad[1] else None,
            *[None] * 7,
            *(grad.to(dtype) for grad, dtype in zip(trained, ctx.dtypes, strict=True)),
        )


class Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        scales: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        matrices: tuple[Tensor, Tensor],
        blocks: tuple[BlockShape, BlockShape],
        *trained: Tensor,
    ) -> Tensor:
        y, wide, states, narrow = _mlp(residual, norm_weight, *matrices, scales, eps)
        ctx.save_for_backward(residual, norm_weight, wide, states, narrow, *matrices, scales)
        ctx.eps, ctx.blocks, ctx.dtypes = eps, blocks, tuple(tensor.dtype for tensor in trained)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        residual, norm_weight, *saved = ctx.saved_tensors
        (sizes, *first), (last_sizes, *second) = ctx.blocks
        (scale, rank), (last_scale, last_rank) = first, second
        x_grad, downs, ups, last, up, of_scales = _mlp_back(
            grads[0].contiguous(), *saved, [scale, last_scale], [rank, last_rank]
        )
        trained = [*_split(downs, ups, sizes, rank), *_split(last, up, last_sizes, last_rank)]
        return (
            _norm_back(x_grad, residual, norm_weight, ctx.eps),
            of_scales if ctx.needs_input_grad[1] else None,
            *[None] * 4,
            *(grad.to(dtype) for grad, dtype in zip(trained, ctx.dtypes, strict=True)),
        )
