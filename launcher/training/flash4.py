"""FlashAttention 4 (the package flash-attn-4) as an operation that torch.compile passes on whole.

Its kernels are made for Hopper and Blackwell, where torch's own are two generations old. They are called beneath its
public function, whose autograd torch.compile cannot trace; what it lacks in another version is an ImportError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

try:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
except ImportError as error:
    raise ImportError(f"flash-attn-4 cannot be used: {error}") from error


@contextmanager
def _refusals() -> Iterator[None]:
    """It refuses what it cannot do by assertions."""
    try:
        yield
    except AssertionError as error:
        raise NotImplementedError(f"FlashAttention 4: {error}") from error


@torch.library.custom_op("launcher::flash4", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    longest: int,
    scale: float,
    softcap: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    with _refusals():
        out, log_sums, *_ = _flash_attn_fwd(
            query,
            key,
            value,
            cu_seqlens_q=borders,
            cu_seqlens_k=borders,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            softcap=softcap or None,
            window_size_left=window,
            window_size_right=None if window is None else 0,
            return_lse=True,
        )
    return out, log_sums


@_attend.register_fake
def _(query: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = query.shape
    return torch.empty_like(query), query.new_empty(num_heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op("launcher::flash4_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    borders: Tensor,
    longest: int,
    scale: float,
    softcap: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    with _refusals():
        grads: tuple[Tensor, Tensor, Tensor] = _flash_attn_bwd(
            query,
            key,
            value,
            out,
            grad,
            log_sums,
            scale,
            True,
            softcap,
            window_size_left=window,
            window_size_right=None if window is None else 0,
            cu_seqlens_q=borders,
            cu_seqlens_k=borders,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
    return grads[0], grads[1], grads[2]


@_attend_backward.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, borders, *options = inputs
    ctx.save_for_backward(query, key, value, *output, borders)
    ctx.options = options


def _go_back(ctx: Any, grad: Tensor, _log_sums_grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = _attend_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None, None, None)


_attend.register_autograd(_go_back, setup_context=_remember)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    longest: int,
    scale: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """[tokens, heads, features] each; `window` counts the tokens looked back at, itself not among them."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _attend(query, key, value, borders, longest, scale, softcap or 0.0, window)[0]
    return out
