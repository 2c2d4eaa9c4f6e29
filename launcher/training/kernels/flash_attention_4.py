"""FlashAttention 4 (the package flash-attn-4) as a custom op that torch.compile does not trace into.

It is written for Hopper and Blackwell, where torch's own FlashAttention is two generations old. We call its internal
forward and backward functions, because torch.compile cannot trace the autograd.Function of the public one. Importing
this module raises ImportError if flash-attn-4 is missing or does not have them.
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
def _unsupported_as_not_implemented() -> Iterator[None]:
    """Raise NotImplementedError instead of AssertionError, by which flash-attn-4 reports unsupported arguments."""
    try:
        yield
    except AssertionError as error:
        raise NotImplementedError(f"FlashAttention 4: {error}") from error


@torch.library.custom_op("launcher::flash_attention_4", mutates_args=())
def _flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    sm_scale: float,
    softcap: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    with _unsupported_as_not_implemented():
        o, lse, *_ = _flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=sm_scale,
            causal=True,
            softcap=softcap or None,
            window_size_left=window,
            window_size_right=None if window is None else 0,
            return_lse=True,
        )
    return o, lse


@_flash_attention_4.register_fake
def _(q: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    return torch.empty_like(q), q.new_empty(num_heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op("launcher::flash_attention_4_backward", mutates_args=())
def _flash_attention_4_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    sm_scale: float,
    softcap: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    with _unsupported_as_not_implemented():
        grads: tuple[Tensor, Tensor, Tensor] = _flash_attn_bwd(
            q,
            k,
            v,
            o,
            do,
            lse,
            sm_scale,
            True,
            softcap,
            window_size_left=window,
            window_size_right=None if window is None else 0,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
        )
    return grads[0], grads[1], grads[2]


@_flash_attention_4_backward.register_fake
def _(_do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.options = options


def _backward(ctx: Any, do: Tensor, _lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = _flash_attention_4_backward(do.contiguous(), *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None, None, None)


_flash_attention_4.register_autograd(_backward, setup_context=_setup_context)


def flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    sm_scale: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Return causal attention within each document, for tensors [tokens, heads, head_dim].

    `window` counts the visible tokens before the query's own.
    """
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    o: Tensor = _flash_attention_4(q, k, v, cu_seqlens, max_seqlen, sm_scale, softcap or 0.0, window)[0]
    return o
