"""The halves of a decoder layer (half_operations.py) as autograd knows them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.training.half_operations import heads, heads_back, mlp, mlp_back
from launcher.training.layer_passes import copies_values, pass_norm

BlockShape = tuple[tuple[int, ...], float, int]  # sizes of its matrices, LoRA's scale and rank
Seeds = tuple[Tensor | None, float]  # for each input that is dropped from, and the rate


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
        dropping: Seeds,
        eps: float,
        counts: tuple[int, int],
        block: BlockShape,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_norm, key_norm = (None, None) if norms is None else norms
        seeds, rate = dropping
        wide, states, rest, query, key, value = heads(
            residual, norm_weight, matrix, scales, query_norm, key_norm, *angles, seeds, rate, eps, *counts
        )
        if not copies_values(scales, norms):
            value = states[:, -counts[1] * query.shape[2] :].unflatten(1, (counts[1], query.shape[2]))
        ctx.save_for_backward(
            residual, norm_weight, wide, states, rest, matrix, scales, query_norm, key_norm, *angles, seeds
        )
        ctx.rate, ctx.eps, ctx.block, ctx.dtypes = rate, eps, block, tuple(tensor.dtype for tensor in trained)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        given = (grad.contiguous() for grad in grads)
        residual, norm_weight, *saved = ctx.saved_tensors
        sizes, scale, rank = ctx.block
        wants_input = ctx.needs_input_grad[0]
        x_grad, downs, ups, of_scales = heads_back(
            *given, *saved, ctx.rate, ctx.eps, list(sizes), scale, rank, wants_input
        )
        trained = _split(downs, ups, sizes, rank)
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
        matrices: tuple[Tensor, Tensor],
        blocks: tuple[BlockShape, BlockShape],
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        seeds, rate = dropping
        y, y_rest, wide, states, rest, narrow = mlp(residual, norm_weight, *matrices, scales, seeds, rate, eps)
        ctx.save_for_backward(residual, norm_weight, wide, states, rest, narrow, *matrices, scales, seeds)
        ctx.rate, ctx.eps, ctx.blocks, ctx.dtypes = rate, eps, blocks, tuple(tensor.dtype for tensor in trained)
        return y, y_rest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        residual, norm_weight, *saved = ctx.saved_tensors
        (sizes, *first), (last_sizes, *second) = ctx.blocks
        (scale, rank), (last_scale, last_rank) = first, second
        given = (grad.contiguous() for grad in grads)
        x_grad, downs, ups, last, up, of_scales = mlp_back(
            *given, *saved, ctx.rate, [scale, last_scale], [rank, last_rank]
        )
        trained = [*_split(downs, ups, sizes, rank), *_split(last, up, last_sizes, last_rank)]
        return (
            pass_norm(x_grad, residual, norm_weight, ctx.eps),
            of_scales if ctx.needs_input_grad[1] else None,
            *[None] * 5,
            *(grad.to(dtype) for grad, dtype in zip(trained, ctx.dtypes, strict=True)),
        )
