"""Attention for whoever has no variable-length kernel: documents of like length in one padded call.

Lengths are rounded up to a power of two: a micro-batch takes a handful of calls whatever the number of documents, and
less than half of what they compute is padding. Padding stands behind a document, where causal attention hides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from launcher.training.batches import PackedBatch

Documents = dict[str, Any]  # what a backend made of a batch, handed through a model that does not look at it
_SHORTEST = 32

# (query, key, value [documents, heads, tokens, features], scaling, softcap, window) -> the same shape
AttendPadded = Callable[[Tensor, Tensor, Tensor, float | None, float | None, int | None], Tensor]


@dataclass(frozen=True, slots=True)
class _Group:
    """Documents of like length: where their tokens lie, padding included, and which of these are no padding."""

    taken: Tensor  # [documents * length]
    num_documents: int
    kept: Tensor  # positions in `taken` that are real tokens


def describe_groups(batch: PackedBatch) -> Documents:
    lengths = np.array([length for length in batch.document_lengths if length], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    rounded = np.maximum(_SHORTEST, 2 ** np.ceil(np.log2(lengths)).astype(np.int64))
    groups, order = [], []
    for length in np.unique(rounded).tolist():
        chosen = rounded == length
        steps = np.arange(length)[None, :]
        taken = starts[chosen][:, None] + np.minimum(steps, lengths[chosen][:, None] - 1)
        kept = np.flatnonzero(steps < lengths[chosen][:, None])
        order.append(taken.reshape(-1)[kept])
        device = batch.input_ids.device
        groups.append(_Group(_to(taken.reshape(-1), device), int(chosen.sum()), _to(kept, device)))
    back = np.argsort(np.concatenate(order))
    return {"groups": tuple(groups), "back": _to(back, batch.input_ids.device)}


def _to(positions: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(positions)).to(device)


def in_groups(attend: AttendPadded) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # every micro-batch has other groups
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents,
        scaling: float | None,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        pieces = []
        for group in documents["groups"]:
            q, k, v = (_take(tensor, group) for tensor in (query, key, value))
            out = attend(q, k, v, scaling, softcap, window)
            pieces.append(out.transpose(1, 2).flatten(0, 1).index_select(0, group.kept))
        return torch.cat(pieces).index_select(0, documents["back"]).unsqueeze(0)

    return run


def _take(tensor: Tensor, group: _Group) -> Tensor:
    """[1, heads, tokens, features] -> [documents, heads, length, features]"""
    taken = tensor[0].index_select(1, group.taken)
    return taken.unflatten(1, (group.num_documents, -1)).transpose(0, 1)


def attend_sdpa(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None, window: int | None
) -> Tensor:
    if softcap is not None:
        raise NotImplementedError("sdpa: this base caps its attention scores, which this backend cannot do")
    looks_back = window is not None and window < query.shape[2]
    if _is_without_flash(query):  # the kernel that keeps no scores there knows no groups of heads
        key, value = _repeat(key, query), _repeat(value, query)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_visible(query, window) if looks_back else None,
        is_causal=not looks_back,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend_eager(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None, window: int | None
) -> Tensor:
    """The whole matrix of scores of each document."""
    key, value = _repeat(key, query), _repeat(value, query)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(query, window), float("-inf"))
    return torch.softmax(scores.float(), dim=-1).to(query.dtype) @ value


def _is_without_flash(query: Tensor) -> bool:
    if not query.is_cuda:
        return False
    return query.dtype == torch.float32 or torch.cuda.get_device_capability(query.device) < (8, 0)


def _repeat(heads: Tensor, query: Tensor) -> Tensor:
    """For every query head."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _visible(query: Tensor, window: int | None) -> Tensor:
    """[tokens, tokens]: a token sees itself and what stands before it, as far back as the window reaches."""
    positions = torch.arange(query.shape[2], device=query.device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
