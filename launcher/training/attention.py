"""Attention over documents laid end to end: each backend keeps them apart, and the run proves it before it trains."""

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

from launcher.choices import AttentionBackend
from launcher.training.batches import PackedBatch
from launcher.training.grouped import Documents, attend_eager, attend_sdpa, describe_groups, in_groups

# torch 2.11 always shares keys among query heads, 2.13 wants to be told. Looked up here, once: a lookup inside a kernel
# would break torch.compile's graph.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


# (query, key, value, what `describe` made of the batch, scaling, softcap, window). A family may scale its scores, cap
# them, or look back only `window` tokens, itself included. Plain arguments: torch.compile cannot see through a class.
# Tensors are [1, heads, tokens, features]; the answer is [1, tokens, heads, features].
Kernel = Callable[[Tensor, Tensor, Tensor, Documents, float | None, float | None, int | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    kernel: Kernel
    # What it must know of a micro-batch. Made once for all layers, and only what stays the same under torch.compile.
    describe: Callable[[PackedBatch], Documents]


def register(name: str, backend: Backend) -> str:
    """Makes a kernel known to transformers under a name of ours, for every model family. No mask is ever built."""
    kernel = backend.kernel

    def attend(
        module: nn.Module,  # noqa: ARG001  (transformers' signature)
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG001
        scaling: float | None = None,
        dropout: float = 0.0,  # noqa: ARG001  (of attention: the bases have none, and the plan counts on none)
        softcap: float | None = None,
        sliding_window: int | None = None,
        documents: Documents | None = None,
        **_more: Any,
    ) -> tuple[Tensor, None]:
        if documents is None:
            raise NotImplementedError("this family of models does not pass on to attention where documents begin")
        return kernel(query, key, value, documents, scaling, softcap, sliding_window), None

    # transformers looks for "flash" and "sdpa" inside a name, in small letters, and would ask for its own kernels.
    full_name = f"launcher_{name.upper()}"
    ALL_ATTENTION_FUNCTIONS.register(full_name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(full_name, _no_mask)
    return full_name


def _no_mask(*_arguments: Any, **_more: Any) -> None:
    return None


def _borders(batch: PackedBatch) -> Documents:
    return {"cu_seqlens": batch.cu_seqlens, "max_length": batch.max_length}


def _end_to_end(tensor: Tensor) -> Tensor:
    """[tokens, heads, features], in the 16 bits that FlashAttention takes: fp32 norms and DoRA over NF4 leave fp32."""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    return flat.to(torch.bfloat16) if flat.dtype == torch.float32 else flat


def _over_end_to_end(attend: Kernel) -> Kernel:
    """For those whose tensors are [tokens, heads, features], in 16 bits."""

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents,
        scaling: float | None,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        heads = _end_to_end(query), _end_to_end(key), _end_to_end(value)
        out = attend(heads[0], heads[1], heads[2], documents, scaling, softcap, window)
        return out.unsqueeze(0).to(value.dtype)  # not the query's, which a norm leaves in FP32: a copy would be kept

    return run


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """FlashAttention inside torch, for documents of different lengths."""
    _refuse_softcap("varlen", softcap)
    borders, longest = documents["cu_seqlens"], documents["max_length"]
    looks_back = (-1 if window is None else window - 1, 0)
    out = varlen_attn(
        query, key, value, borders, borders, longest, longest, scale=scaling, window_size=looks_back, **_GQA
    )
    assert isinstance(out, Tensor)
    return out


def _flash_package(module: str) -> Kernel:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents,
        scaling: float | None,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        function = import_module(module).flash_attn_varlen_func
        borders, longest = documents["cu_seqlens"], documents["max_length"]
        out: Tensor = function(
            query,
            key,
            value,
            borders,
            borders,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scaling,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return out

    return attend


def _flash4(query: Tensor, key: Tensor, value: Tensor, documents: Documents, *scores: Any) -> Tensor:
    from launcher.training.flash4 import attend

    scaling, softcap, window = scores
    borders, longest = documents["cu_seqlens"], documents["max_length"]
    return attend(query, key, value, borders, longest, scaling, softcap, None if window is None else window - 1)


def _triton(query: Tensor, key: Tensor, value: Tensor, documents: Documents, *scores: Any) -> Tensor:
    from launcher.training.document_attention import attend

    return attend(query, key, value, documents["starts"], documents["ends"], *scores)


def _starts_and_ends(batch: PackedBatch) -> Documents:
    """Of each token's document."""
    borders = batch.cu_seqlens
    positions = torch.arange(batch.input_ids.shape[1], device=borders.device, dtype=borders.dtype)
    document = torch.searchsorted(borders, positions, right=True, out_int32=True)
    return {"starts": borders[document - 1], "ends": borders[document], "max_length": batch.max_length}


def _block_mask(batch: PackedBatch) -> Documents:
    device, num_tokens = batch.input_ids.device, batch.input_ids.shape[1]
    positions = torch.arange(num_tokens, device=device)
    document = torch.searchsorted(batch.cu_seqlens[1:].contiguous(), positions, right=True)

    def same_document(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key)

    blocks = create_block_mask(same_document, None, None, num_tokens, num_tokens, device=device.type)
    return {"blocks": blocks, "max_length": batch.max_length}


@cache
def _fused_flex() -> Any:
    """By itself it holds the whole matrix of scores: only the compiler makes a fused kernel of it."""
    return torch.compile(flex_attention, dynamic=False)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    _refuse_softcap("flex", softcap)
    if window is not None and window < documents["max_length"]:
        raise NotImplementedError("flex: this base looks back only so far, which this backend cannot do")
    attend = flex_attention if torch.compiler.is_compiling() or not query.is_cuda else _fused_flex()
    shares_keys = query.shape[1] != key.shape[1]
    out: Tensor = attend(query, key, value, block_mask=documents["blocks"], scale=scaling, enable_gqa=shares_keys)
    return out.transpose(1, 2)


def _refuse_softcap(name: str, softcap: float | None) -> None:
    if softcap is not None:
        raise NotImplementedError(f"{name}: this base caps its attention scores, which this backend cannot do")


BACKENDS: dict[AttentionBackend, Backend] = {
    "flash_attention_4": Backend(kernel=_over_end_to_end(_flash4), describe=_borders),
    "flash_attention_3": Backend(kernel=_over_end_to_end(_flash_package("flash_attn_interface")), describe=_borders),
    "flash_attention_2": Backend(kernel=_over_end_to_end(_flash_package("flash_attn")), describe=_borders),
    "triton": Backend(kernel=_over_end_to_end(_triton), describe=_starts_and_ends),
    "varlen": Backend(kernel=_over_end_to_end(_varlen), describe=_borders),
    "flex": Backend(kernel=_flex, describe=_block_mask),
    "sdpa": Backend(kernel=in_groups(attend_sdpa), describe=describe_groups),
    "eager": Backend(kernel=in_groups(attend_eager), describe=describe_groups),
}
