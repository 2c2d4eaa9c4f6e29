"""Grouped attention against plain attention in fp64, for any document lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.core.choices import AttentionBackend
from launcher.training.data.collate import choose_batch_shape, collate
from launcher.training.model.attention import BACKENDS, Backend, register_backend
from tests.training.builders import make_document, make_pack

quick = settings(deadline=None, max_examples=25)
HEADS, KEY_HEADS, FEATURES = 4, 2, 8


def attend_exactly(
    tensors: tuple[Tensor, Tensor, Tensor], document: Tensor, scaling: float, softcap: float | None, window: int | None
) -> Tensor:
    """Plain attention in fp64, [1, tokens, heads, head_dim]."""
    query, key, value = (tensor.double() for tensor in tensors)
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(len(document))
    distance = place[:, None] - place[None, :]
    visible = (document[:, None] == document[None, :]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    return (torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex"])
@quick
@given(
    lengths=st.lists(st.integers(2, 70), min_size=1, max_size=7),
    padding=st.integers(0, 40),
    scaling=st.sampled_from([FEATURES**-0.5, 0.1, 1.0]),
    softcap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, 1, 5, 33]),
)
def test_grouped_attention_matches_plain_attention(
    name: AttentionBackend, lengths: list[int], padding: int, scaling: float, softcap: float | None, window: int | None
) -> None:
    if name == "sdpa":
        softcap = None  # refused, see test_packing.py
    pack = make_pack([make_document(length, 1, index) for index, length in enumerate(lengths)])
    num_tokens = sum(lengths) + padding
    batch = collate([pack], choose_batch_shape(np.array([len(lengths)]), 1, num_tokens, is_packed=True))
    generator = torch.Generator().manual_seed(len(lengths))
    tensors = (
        torch.randn(1, HEADS, num_tokens, FEATURES, generator=generator),
        torch.randn(1, KEY_HEADS, num_tokens, FEATURES, generator=generator),
        torch.randn(1, KEY_HEADS, num_tokens, FEATURES, generator=generator),
    )
    backend = BACKENDS[name]
    out = backend.kernel(*tensors, backend.build_metadata(batch), scaling, softcap, window)
    counts = torch.tensor(batch.document_lengths)
    document = torch.repeat_interleave(torch.arange(len(counts)), counts)
    wanted = attend_exactly(tensors, document, scaling, softcap, window)
    assert out.shape == (1, num_tokens, HEADS, FEATURES)
    # fp32 (6e-8) against fp64: softmax over up to 70 values.
    assert float((out.double() - wanted).abs().max()) < 4e-6


def test_sinks_reach_the_kernels_that_support_them() -> None:
    seen: list[dict[str, object]] = []

    def kernel(query: Tensor, _key: Tensor, _value: Tensor, metadata: dict[str, object], *_scores: object) -> Tensor:
        seen.append(metadata)
        return query

    backend = Backend(kernel=kernel, build_metadata=lambda _batch: {})
    query, sinks = torch.zeros(1, HEADS, 3, FEATURES), torch.zeros(HEADS)
    for name in BACKENDS:
        attend = ALL_ATTENTION_FUNCTIONS[register_backend(name, backend)]
        try:
            if name in ("triton", "eager"):
                attend(None, query, query, query, None, documents={}, s_aux=sinks)
                assert seen.pop()["sinks"] is sinks
            else:
                with pytest.raises(NotImplementedError, match=f"{name}: this backend does not support attention sinks"):
                    attend(None, query, query, query, None, documents={}, s_aux=sinks)
        finally:
            register_backend(name, BACKENDS[name])
