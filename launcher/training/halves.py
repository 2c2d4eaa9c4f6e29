"""The halves of a decoder layer (half_operations.py) as autograd knows them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.training.half_operations import heads, heads_back, last, last_back, mlp, mlp_back
from launcher.training.layer_passes import copies_values, pass_norm
from launcher.training.packed import Stored, build

# Sizes of its matrices, which of them are adapted, LoRA's scale and rank.
BlockShape = tuple[tuple[int, ...], tuple[int, ...], float, int]
Seeds = tuple[Tensor | None, float]  # for each input that is dropped from, and the rate


def _split(downs: Tensor, ups: Tensor, block: BlockShape) -> list[Tensor]:
    """Of each A, then of each B, as those of a block are given to the operations."""
    sizes, adapted, _scale, rank = block
    of_downs, of_ups = downs.split(rank), ups.split(list(sizes))
    return [*(of_downs[index] for index in adapted), *(of_ups[index] for index in adapted)]


class Heads(torch.autograd.Function):
    """The residual stream [tokens, in], behind a norm -> queries, keys, values [tokens, heads, size]."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        scales: Tensor | None,
        norm_weight: Tensor,
        stored: Stored,
        norms: tuple[Tensor, Tensor] | None,
        angles: tuple[Tensor, Tensor],
        dropping: Seeds,
        eps: float,
        counts: tuple[int, int],
        block: BlockShape,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_norm, key_norm = (None, None) if norms is None else norms
        seeds, rate = dropping
        wide, states, rest, query, key, value = heads(
            residual, norm_weight, build(stored), scales, query_norm, key_norm, *angles, seeds, rate, eps, *counts
        )
        if not copies_values(scales, norms):
            value = states[:, -counts[1] * query.shape[2] :].unflatten(1, (counts[1], query.shape[2]))
        ctx.save_for_backward(
            residual, norm_weight, wide, states, rest, scales, query_norm, key_norm, *angles, seeds, *stored
        )
        ctx.rate, ctx.eps, ctx.block, ctx.dtypes = rate, eps, block, tuple(tensor.dtype for tensor in trained)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        given = [grad.contiguous() for grad in grads]
        residual, norm_weight, wide, states, rest, *more = ctx.saved_tensors
        others, stored = more[:6], tuple(more[6:])
        matrix = build(stored, given[0])
        sizes, _adapted, scale, rank = ctx.block
        wants_input = ctx.needs_input_grad[0]
        x_grad, downs, ups, of_scales = heads_back(
            *given, wide, states, rest, matrix, *others, ctx.rate, ctx.eps, list(sizes), scale, rank, wants_input
        )
        trained = _split(downs, ups, ctx.block)
        return (
            pass_norm(x_grad, residual, norm_weight, ctx.eps) if wants_input else None,
            of_scales if ctx.needs_input_grad[1] else None,
            *[None] * 8,
            *(grad.to(dtype) for grad, dtype in zip(trained, ctx.dtypes, strict=True)),
        )


class Mlp(torch.autograd.Function):
    """The residual stream -> the answer, and what is added to it behind its scaling (empty: nothing)."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        scales: Tensor | None,
        norm_weight: Tensor,
        dropping: Seeds,
        eps: float,
        stored: tuple[Stored, Stored],
        blocks: tuple[BlockShape, BlockShape],
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        seeds, rate = dropping
        gates, down = (build(one) for one in stored)
        bare_gate = 0 not in blocks[0][1]
        y, y_rest, wide, states, rest, narrow = mlp(
            residual, norm_weight, gates, down, scales, seeds, rate, eps, bare_gate
        )
        ctx.save_for_backward(residual, norm_weight, wide, states, rest, narrow, scales, seeds, *stored[0], *stored[1])
        ctx.rate, ctx.eps, ctx.blocks, ctx.dtypes = rate, eps, blocks, tuple(tensor.dtype for tensor in trained)
        return y, y_rest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        residual, norm_weight, wide, states, rest, narrow, scales, seeds, *stored = ctx.saved_tensors
        (*_, scale, rank), (*_, last_scale, last_rank) = ctx.blocks
        given = [grad.contiguous() for grad in grads]
        half = len(stored) // 2
        gates, down = (build(tuple(one), given[0]) for one in (stored[:half], stored[half:]))
        x_grad, downs, ups, last, up, of_scales = mlp_back(
            *given,
            *(wide, states, rest, narrow, gates, down, scales, seeds),
            *(ctx.rate, [scale, last_scale], [rank, last_rank]),
        )
        trained = [*_split(downs, ups, ctx.blocks[0]), *_split(last, up, ctx.blocks[1])]
        return (
            pass_norm(x_grad, residual, norm_weight, ctx.eps),
            of_scales if ctx.needs_input_grad[1] else None,
            *[None] * 5,
            *(grad.to(dtype) for grad, dtype in zip(trained, ctx.dtypes, strict=True)),
        )


class Last(torch.autograd.Function):
    """The attention's output [tokens, in], from which an adapter drops -> the answer and its rest, as an Mlp's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropping: tuple[Tensor, float],
        stored: Stored,
        block: BlockShape,
        splits: bool,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        y, y_rest, narrow = last(x, build(stored), *dropping, splits)
        ctx.save_for_backward(x, narrow, dropping[0], *stored)
        ctx.rate, ctx.block, ctx.dtypes = dropping[1], block, tuple(tensor.dtype for tensor in trained)
        return y, y_rest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, narrow, seeds, *stored = ctx.saved_tensors
        given = [grad.contiguous() for grad in grads]
        *_, scale, rank = ctx.block
        matrix = build(tuple(stored), given[0])
        x_grad, *trained = last_back(*given, x, narrow, matrix, seeds, ctx.rate, scale, rank)
        return x_grad, *[None] * 4, *(grad.to(dtype) for grad, dtype in zip(trained, ctx.dtypes, strict=True))
