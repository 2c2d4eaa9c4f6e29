"""Attention backends for packed documents: no token attends to another document, as verify/packing.py checks.

Argument names follow FlashAttention. transformers' tensors are [1, heads, tokens, head_dim]; a kernel returns
[1, tokens, heads, head_dim].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.core.choices import SINK_ATTENTION, AttentionBackend
from launcher.training.data.collate import PackedBatch
from launcher.training.model.padded_attention import (
    AttentionMetadata,
    attend_eager,
    attend_sdpa,
    build_group_metadata,
    make_grouped_kernel,
)

# torch 2.11 always supports GQA here, 2.13 needs a flag. Inspected at import, because doing so inside a kernel would
# break torch.compile's graph.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


# (q, k, v, metadata, sm_scale, softcap, window). A model may scale its scores, softcap them, or see only the last
# `window` tokens, its own included. Plain arguments, because torch.compile cannot trace through a class.
Kernel = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float | None, float | None, int | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """An attention kernel, and how to build the metadata it needs."""

    kernel: Kernel
    # Called once per micro-batch, for all layers. Contains only what stays constant under torch.compile.
    build_metadata: Callable[[PackedBatch], AttentionMetadata]


def register_backend(name: str, backend: Backend) -> str:
    """Register an attention backend with transformers, which then builds no masks for it, and return its name there."""
    kernel = backend.kernel

    def attend(
        module: nn.Module,  # noqa: ARG001  (transformers' signature)
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG001
        scaling: float | None = None,
        dropout: float = 0.0,  # noqa: ARG001  (a base's attention dropout; the plan says that it is not applied)
        softcap: float | None = None,
        sliding_window: int | None = None,
        documents: AttentionMetadata | None = None,
        s_aux: Tensor | None = None,  # attention sinks: a learned score per head, as in gpt-oss
        **_more: Any,
    ) -> tuple[Tensor, None]:
        if documents is None:
            raise NotImplementedError(
                "this model family does not pass keyword arguments on to its attention, which needs document boundaries"
            )
        if s_aux is not None and name not in SINK_ATTENTION:
            raise NotImplementedError(f"{name}: this backend does not support attention sinks")
        if s_aux is not None:
            documents = {**documents, "sinks": s_aux}
        return kernel(query, key, value, documents, scaling, softcap, sliding_window), None

    # Upper case, because transformers searches the name for "flash" and "sdpa" and would load its own kernels.
    full_name = f"launcher_{name.upper()}"
    ALL_ATTENTION_FUNCTIONS.register(full_name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(full_name, _no_mask)
    return full_name


def _no_mask(*_arguments: Any, **_more: Any) -> None:
    return None


def _cu_seqlens(batch: PackedBatch) -> AttentionMetadata:
    return {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_length}


def _flatten(tensor: Tensor) -> Tensor:
    """Return q, k or v as [tokens, heads, head_dim]; FP32, from FP32 norms or DoRA on NF4, is cast to BF16."""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    return flat.to(torch.bfloat16) if flat.dtype == torch.float32 else flat


def _over_flat_tensors(attend: Kernel) -> Kernel:
    """Return a kernel for transformers' tensors that calls one for [tokens, heads, head_dim] in 16 bits."""

    def run(query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, *scores: Any) -> Tensor:
        o = attend(_flatten(query), _flatten(key), _flatten(value), metadata, *scores)
        return o.unsqueeze(0).to(value.dtype)  # not the query's dtype, which a norm may leave in FP32

    return run


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata,
    sm_scale: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Return causal attention by torch's varlen_attn, the FlashAttention that is built into torch."""
    if softcap is not None:
        raise NotImplementedError("varlen: this backend does not support softcapped attention scores")
    cu_seqlens, max_seqlen = metadata["cu_seqlens"], metadata["max_seqlen"]
    window_size = (-1 if window is None else window - 1, 0)
    o = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=sm_scale, window_size=window_size, **_GQA
    )
    assert isinstance(o, Tensor)
    return o


def _flash_package(module: str) -> Kernel:
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        sm_scale: float | None,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        function = import_module(module).flash_attn_varlen_func
        cu_seqlens, max_seqlen = metadata["cu_seqlens"], metadata["max_seqlen"]
        o: Tensor = function(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=sm_scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return o

    return attend


def _flash_attention_4(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, *scores: Any) -> Tensor:
    from launcher.training.kernels.flash_attention_4 import flash_attention_4

    sm_scale, softcap, window = scores
    left = None if window is None else window - 1
    return flash_attention_4(q, k, v, metadata["cu_seqlens"], metadata["max_seqlen"], sm_scale, softcap, left)


def _triton(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, *scores: Any) -> Tensor:
    from launcher.training.kernels.varlen_attention import varlen_attention

    sm_scale, softcap, window = scores
    starts, ends, sinks = metadata["doc_starts"], metadata["doc_ends"], metadata.get("sinks")
    return varlen_attention(q, k, v, starts, ends, sm_scale, softcap, window, sinks)


def _document_bounds(batch: PackedBatch) -> AttentionMetadata:
    """Return attention metadata: for each token, the positions at which its document starts and ends."""
    cu_seqlens = batch.cu_seqlens
    positions = torch.arange(batch.input_ids.shape[1], device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, positions, right=True, out_int32=True)
    return {
        "doc_starts": cu_seqlens[document - 1],
        "doc_ends": cu_seqlens[document],
        "max_seqlen": batch.max_length,
    }


def _block_mask(batch: PackedBatch) -> AttentionMetadata:
    device, num_tokens = batch.input_ids.device, batch.input_ids.shape[1]
    positions = torch.arange(num_tokens, device=device)
    document = torch.searchsorted(batch.cu_seqlens[1:].contiguous(), positions, right=True)

    def same_document(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key)

    block_mask = create_block_mask(same_document, None, None, num_tokens, num_tokens, device=device.type)
    return {"block_mask": block_mask, "max_seqlen": batch.max_length}


@cache
def _compiled_flex() -> Any:
    """Return the compiled flex_attention; without the compiler, it materializes all scores."""
    return torch.compile(flex_attention, dynamic=False)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    sm_scale: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    attend = flex_attention if torch.compiler.is_compiling() or not query.is_cuda else _compiled_flex()
    is_gqa = query.shape[1] != key.shape[1]
    if window is not None and window >= metadata["max_seqlen"]:
        window = None
    score_mod = _make_score_mod(softcap, window) if softcap is not None or window is not None else None
    block_mask = metadata["block_mask"]
    o: Tensor = attend(query, key, value, score_mod=score_mod, block_mask=block_mask, scale=sm_scale, enable_gqa=is_gqa)
    return o.transpose(1, 2)


@cache
def _make_score_mod(softcap: float | None, window: int | None) -> Callable[..., Tensor]:
    """Return FlexAttention's score_mod, which applies the softcap and the sliding window.

    The window is not in the block mask, because all layers share that mask. Scores of keys outside the window are
    therefore computed and discarded.
    """

    def modify(score: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if window is None else torch.where(query - key < window, score, float("-inf"))

    return modify


BACKENDS: dict[AttentionBackend, Backend] = {
    "flash_attention_4": Backend(kernel=_over_flat_tensors(_flash_attention_4), build_metadata=_cu_seqlens),
    "flash_attention_3": Backend(
        kernel=_over_flat_tensors(_flash_package("flash_attn_interface")), build_metadata=_cu_seqlens
    ),
    "flash_attention_2": Backend(kernel=_over_flat_tensors(_flash_package("flash_attn")), build_metadata=_cu_seqlens),
    "triton": Backend(kernel=_over_flat_tensors(_triton), build_metadata=_document_bounds),
    "varlen": Backend(kernel=_over_flat_tensors(_varlen), build_metadata=_cu_seqlens),
    "flex": Backend(kernel=_flex, build_metadata=_block_mask),
    "sdpa": Backend(kernel=make_grouped_kernel(attend_sdpa), build_metadata=build_group_metadata),
    "eager": Backend(kernel=make_grouped_kernel(attend_eager), build_metadata=build_group_metadata),
}
