"""Collated batches have fixed shapes, isolated padding, and next tokens as targets."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from launcher.core.choices import UNPACKED_SIZES
from launcher.corpus.pack_file import Pack
from launcher.training.data.collate import BatchShape, PackedBatch, choose_batch_shape, collate
from tests.training.builders import Document, make_document, make_pack

quick = settings(deadline=None, max_examples=80)


@st.composite
def documents(draw: st.DrawFn, longest: int) -> Document:
    """The store never trains a first token, and omits documents without trained tokens."""
    length = draw(st.integers(2, longest))
    ids = draw(st.lists(st.integers(1, 99), min_size=length, max_size=length))
    trained = [0, *draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1))]
    trained[draw(st.integers(1, length - 1))] = 1
    return Document(ids=tuple(ids), trained=tuple(trained))


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[Pack], list[Pack | None], BatchShape]:
    """All packs of a split, some of them in one micro-batch, and the shape for the split."""
    sequence_length = draw(st.integers(2, 24))
    is_packed = draw(st.booleans())
    packs = []
    for _ in range(draw(st.integers(1, 6))):
        chosen = [draw(documents(sequence_length))]
        while is_packed and draw(st.booleans()):
            room = sequence_length - sum(len(document.ids) for document in chosen)
            if room < 2:
                break
            chosen.append(draw(documents(room)))
        packs.append(make_pack(chosen))
    micro = draw(st.integers(1, 5))
    order = draw(st.permutations(range(len(packs))))
    slots: list[Pack | None] = [packs[index] for index in order[:micro] if draw(st.booleans())]
    slots += [None] * (micro - len(slots))
    counts = np.array([len(pack.document_lengths) for pack in packs], dtype=np.int64)
    return packs, slots, choose_batch_shape(counts, micro, sequence_length, is_packed=is_packed)


def borders_of(batch: PackedBatch) -> list[tuple[int, int]]:
    """Bounds of the non-empty documents, padding included."""
    ends = batch.cu_seqlens.tolist()
    return [(begin, end) for begin, end in itertools.pairwise(ends) if end > begin]


@quick
@given(splits())
def test_shapes_are_fixed(split: tuple[list[Pack], list[Pack | None], BatchShape]) -> None:
    _, slots, shape = split
    batch = collate(slots, shape)
    num_tokens = sum(len(pack.input_ids) for pack in slots if pack is not None)
    assert batch.input_ids.shape == batch.position_ids.shape == (1, shape.padded_length(num_tokens))
    assert num_tokens <= batch.input_ids.shape[1] <= shape.max_tokens
    fitting = [size for size in shape.document_sizes if size >= len(batch.document_lengths)]
    assert len(batch.cu_seqlens) == min(fitting) + 1
    assert len(shape.document_sizes) <= 2, "graphs for two lengths of borders at most"
    assert batch.max_length == shape.sequence_length
    if shape.is_packed:
        assert batch.input_ids.shape[1] == shape.max_tokens
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.input_ids.dtype == batch.position_ids.dtype == batch.targets.dtype == torch.int64


@quick
@given(splits())
def test_cu_seqlens_cover_all_tokens_and_respect_max_length(
    split: tuple[list[Pack], list[Pack | None], BatchShape],
) -> None:
    """cu_seqlens has room for the documents of any packs, and padding."""
    _, slots, shape = split
    batch = collate(slots, shape)
    borders = borders_of(batch)
    assert int(batch.cu_seqlens[0]) == 0
    assert int(batch.cu_seqlens[-1]) == batch.input_ids.shape[1]
    assert bool((batch.cu_seqlens[1:] >= batch.cu_seqlens[:-1]).all())
    lengths = [end - begin for begin, end in borders]
    assert max(lengths) <= batch.max_length
    assert lengths == list(batch.document_lengths)
    real = [int(length) for pack in slots if pack is not None for length in pack.document_lengths]
    assert lengths[: len(real)] == real, "padding comes last"


@quick
@given(splits())
def test_positions_restart_with_each_document(split: tuple[list[Pack], list[Pack | None], BatchShape]) -> None:
    _, slots, shape = split
    batch = collate(slots, shape)
    for begin, end in borders_of(batch):
        assert batch.position_ids[0, begin:end].tolist() == list(range(end - begin))


@quick
@given(splits())
def test_targets_are_the_next_tokens(split: tuple[list[Pack], list[Pack | None], BatchShape]) -> None:
    """Every marked token is predicted from the previous token of its document; padding never is."""
    _, slots, shape = split
    batch = collate(slots, shape)
    given_packs = [pack for pack in slots if pack is not None]
    marked = np.concatenate([np.zeros(0, dtype=np.uint8), *(pack.trained for pack in given_packs)])
    assert len(batch.targets) == len(batch.trained_positions) == int(marked.sum())
    assert (batch.trained_positions + 1).tolist() == np.flatnonzero(marked).tolist()
    assert batch.targets.tolist() == batch.input_ids[0, batch.trained_positions + 1].tolist()
    begins = {begin for begin, _ in borders_of(batch)}
    assert not begins & set((batch.trained_positions + 1).tolist())


@quick
@given(splits())
def test_tokens_equal_those_of_the_packs(split: tuple[list[Pack], list[Pack | None], BatchShape]) -> None:
    _, slots, shape = split
    ids = [token for pack in slots if pack is not None for token in pack.input_ids.tolist()]
    assert collate(slots, shape).input_ids[0].tolist()[: len(ids)] == ids


@quick
@given(st.integers(1, 64), st.integers(1, 4096))
def test_unpacked_rows_have_few_sizes(micro: int, sequence_length: int) -> None:
    shape = BatchShape(micro_batch_size=micro, sequence_length=sequence_length, document_sizes=(1,), is_packed=False)
    counts = np.unique(np.linspace(0, shape.max_tokens, num=200).astype(int)).tolist()
    rooms = [shape.padded_length(count) for count in counts]
    assert len(set(rooms)) <= UNPACKED_SIZES == 8
    assert all(count <= room <= shape.max_tokens for count, room in zip(counts, rooms, strict=True))
    wasted = max(room - count for count, room in zip(counts, rooms, strict=True))
    assert wasted <= -(-shape.max_tokens // 8), "less than an eighth is padding"


def test_empty_micro_batch_trains_nothing() -> None:
    for is_packed in (True, False):
        shape = choose_batch_shape(np.array([2]), 3, 8, is_packed=is_packed)
        batch = collate([None, None, None], shape)
        assert batch.targets.numel() == batch.trained_positions.numel() == 0
        assert batch.input_ids.numel() == shape.padded_length(0) > 0


def test_moved_batch_is_complete() -> None:
    shape = choose_batch_shape(np.array([1]), 1, 8, is_packed=True)
    batch = collate([make_pack([make_document(6, 2, 0)])], shape)
    moved = batch.to(torch.device("cpu"))
    for name in PackedBatch.__slots__:
        ours, theirs = getattr(moved, name), getattr(batch, name)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_only_crowded_micro_batches_use_the_larger_size() -> None:
    """One pack of two hundred has many documents: only its micro-batch is padded to the larger size."""
    counts = np.array([*np.random.default_rng(0).integers(3, 6, size=199), 60], dtype=np.int64)
    shape = choose_batch_shape(counts, 4, 128, is_packed=True)
    usual, most = shape.document_sizes
    assert most == 60 + 3 * 5 + 4  # the four fullest, and padding in each slot
    packs = [make_pack([make_document(2, 1, 0)] * int(count)) for count in counts]
    sizes = [len(collate(packs[begin : begin + 4], shape).cu_seqlens) - 1 for begin in range(0, 200, 4)]
    assert sizes == [usual] * 49 + [most]


def test_pinning_copies_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = make_pack([make_document(40_000, 39_000, seed=0)])
    batch = collate([pack], choose_batch_shape(np.array([1]), 1, 40_000, is_packed=True))
    empty, asked = torch.empty, []

    def take_any(*arguments: Any, pin_memory: bool, **more: Any) -> Tensor:  # pinning needs a GPU driver
        asked.append(pin_memory)
        return empty(*arguments, **more)

    monkeypatch.setattr(torch, "empty", take_any)
    with torch.profiler.profile() as profiled:
        pinned = batch.pin_memory()
    names = ("input_ids", "position_ids", "cu_seqlens", "trained_positions", "targets")
    assert asked == [True] * len(names)
    for name in names:
        ours, theirs = getattr(pinned, name), getattr(batch, name)
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    assert not [event.key for event in profiled.key_averages() if "copy" in event.key]
