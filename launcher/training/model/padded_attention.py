"""Attention without a variable-length kernel: documents of similar length are padded and attended in one call.

Lengths are rounded up to a power of two, so that a micro-batch needs a handful of calls however many documents it has,
and less than half of the computation is padding. Padding follows a document, where causal attention hides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from launcher.training.data.collate import PackedBatch

AttentionMetadata = dict[str, Any]  # built per batch by a backend, passed to its kernel through the model
_MIN_LENGTH = 32

# (query, key, value [documents, heads, tokens, head_dim], sm_scale, softcap, window, and sinks [heads] of a base that
# has them) -> the same shape
AttendPadded = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class _Group:
    """Documents that are padded to the same length and attended in one call."""

    gather: Tensor  # [documents * length], token indices, padding included
    num_documents: int
    real: Tensor  # positions in `gather` that are not padding


def build_group_metadata(batch: PackedBatch) -> AttentionMetadata:
    """Group the documents of a batch by padded length."""
    lengths = np.array([length for length in batch.document_lengths if length], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    rounded = np.maximum(_MIN_LENGTH, 2 ** np.ceil(np.log2(lengths)).astype(np.int64))
    groups, order = [], []
    for length in np.unique(rounded).tolist():
        members = rounded == length
        steps = np.arange(length)[None, :]
        gather = starts[members][:, None] + np.minimum(steps, lengths[members][:, None] - 1)
        real = np.flatnonzero(steps < lengths[members][:, None])
        order.append(gather.reshape(-1)[real])
        device = batch.input_ids.device
        groups.append(_Group(_to(gather.reshape(-1), device), int(members.sum()), _to(real, device)))
    restore_order = np.argsort(np.concatenate(order))
    return {"groups": tuple(groups), "restore_order": _to(restore_order, batch.input_ids.device)}


def _to(positions: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(positions)).to(device)


def make_grouped_kernel(attend: AttendPadded) -> Any:
    """Return a kernel over packed documents that calls `attend` once per group."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # every micro-batch has other groups
    def run(query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, *scores: Any) -> Tensor:
        outputs = []
        sinks = (metadata["sinks"],) if "sinks" in metadata else ()
        for group in metadata["groups"]:
            q, k, v = (_gather(tensor, group) for tensor in (query, key, value))
            out = attend(q, k, v, *scores, *sinks)
            outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, group.real))
        return torch.cat(outputs).index_select(0, metadata["restore_order"]).unsqueeze(0)

    return run


def _gather(tensor: Tensor, group: _Group) -> Tensor:
    """Gather the documents of a group: [1, heads, tokens, head_dim] -> [documents, heads, length, head_dim]."""
    gathered = tensor[0].index_select(1, group.gather)
    return gathered.unflatten(1, (group.num_documents, -1)).transpose(0, 1)


def attend_sdpa(
    query: Tensor, key: Tensor, value: Tensor, sm_scale: float | None, softcap: float | None, window: int | None
) -> Tensor:
    """Return causal attention by torch's scaled_dot_product_attention."""
    if softcap is not None:
        raise NotImplementedError("sdpa: this backend does not support softcapped attention scores")
    is_windowed = window is not None and window < query.shape[2]
    if _lacks_flash(query):  # the memory-efficient kernel, used instead, does not support GQA
        key, value = _repeat_kv(key, query), _repeat_kv(value, query)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_causal_mask(query, window) if is_windowed else None,
        is_causal=not is_windowed,
        scale=sm_scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sm_scale: float | None,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention that materializes all scores. Sinks only add to the softmax's denominator."""
    key, value = _repeat_kv(key, query), _repeat_kv(value, query)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_causal_mask(query, window), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ value


def _lacks_flash(query: Tensor) -> bool:
    if not query.is_cuda:
        return False
    return query.dtype == torch.float32 or torch.cuda.get_device_capability(query.device) < (8, 0)


def _repeat_kv(heads: Tensor, query: Tensor) -> Tensor:
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _causal_mask(query: Tensor, window: int | None) -> Tensor:
    """Return the causal mask [tokens, tokens], true where query i may attend to key j; keys must be within `window`."""
    positions = torch.arange(query.shape[2], device=query.device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
