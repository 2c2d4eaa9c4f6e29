"""Our own attention (attention_tiles.py) as an operation that torch.compile passes on whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher.choices import OWN_GROUP, OWN_HEAD_SIZES
from launcher.training import attention_tiles
from launcher.training.attention_tiles import Heads, Scores, Tile, Tiles, find_key_gradients, find_query_gradients

# Found by benchmarks/attention.py on an H200.
TILES: dict[int, Tiles] = {
    64: Tiles(forward=Tile(64, 32, 4, 3), queries=Tile(64, 64, 4, 3), keys=Tile(64, 64, 4, 2)),
    128: Tiles(forward=Tile(64, 32, 4, 3), queries=Tile(64, 64, 4, 3), keys=Tile(64, 64, 4, 2)),
}
OF_CAPPED = Tile(32, 64, 4, 3)  # the keys' tile of bases that cap their scores: a larger one has no room for the slope


def choose_tiles(heads: Heads) -> Tiles:
    tiles = TILES[heads.size]
    return tiles if heads.scores.softcap is None else replace(tiles, keys=OF_CAPPED)


@torch.library.custom_op("launcher::document_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    scores = Scores(scale=scale, softcap=softcap, window=window)
    heads = Heads(_laid_out(query), _laid_out(key), _laid_out(value), starts, ends, scores)
    return attention_tiles.attend(heads, choose_tiles(heads).forward)


@_attend.register_fake
def _(query: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("launcher::document_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = Scores(scale=scale, softcap=softcap, window=window)
    heads = Heads(_laid_out(query), _laid_out(key), _laid_out(value), starts, ends, scores)
    grad, tiles = _laid_out(grad), choose_tiles(heads)
    of_queries, alongs = find_query_gradients(heads, out, grad, log_sums, tiles.queries)
    return of_queries, *find_key_gradients(heads, grad, log_sums, alongs, tiles.keys)


@_attend_backward.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _laid_out(heads: Tensor) -> Tensor:
    """As the GPU's copy engine takes it: heads of a token beside each other, tokens any multiple of 16 bytes apart."""
    is_dense = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    is_aligned = (heads.stride(0) * heads.element_size()) % 16 == 0 and heads.data_ptr() % 16 == 0
    return heads if is_dense and is_aligned else heads.contiguous()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, ends, *options = inputs
    ctx.save_for_backward(query, key, value, *output, starts, ends)
    ctx.options = options


def _go_back(ctx: Any, grad: Tensor, _log_sums_grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = _attend_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None, None, None)


_attend.register_autograd(_go_back, setup_context=_remember)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """[tokens, heads, features] each; of each token where its document starts and ends, as 32-bit numbers."""
    size, group = query.shape[2], query.shape[1] // key.shape[1]
    if size not in OWN_HEAD_SIZES or group > OWN_GROUP:
        raise NotImplementedError(f"triton: no tiles for heads of {size} features, {group} of which share a key head")
    out: Tensor = _attend(query, key, value, starts, ends, size**-0.5 if scale is None else scale, softcap, window)[0]
    return out
