"""Bin packing keeps every document once, within the capacity, and close to the optimum."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.corpus.bin_packing import (
    Lengths,
    Packing,
    pack_documents,
    pack_one_per_sequence,
)

pytestmark = pytest.mark.long

CAPACITY = 64
lengths_of_documents = st.lists(st.integers(1, CAPACITY), max_size=300).map(
    lambda values: np.array(values, dtype=np.int32)
)


def packs_of(packing: Packing) -> list[list[int]]:
    return [packing.documents[a:b].tolist() for a, b in zip(packing.starts, packing.starts[1:], strict=False)]


@given(lengths=lengths_of_documents, seed=st.integers(0, 5))
def test_every_document_is_packed_once_and_fits(lengths: Lengths, seed: int) -> None:
    packs = packs_of(pack_documents(lengths, CAPACITY, seed))
    assert sorted(document for pack in packs for document in pack) == list(range(len(lengths)))
    for pack in packs:
        assert pack, "a pack without documents"
        assert pack == sorted(pack), "documents of a pack stand by row"
        assert int(lengths[pack].sum()) <= CAPACITY


@given(lengths_of_documents, st.integers(0, 5))
def test_no_two_packs_could_have_been_one(lengths: Lengths, seed: int) -> None:
    packing = pack_documents(lengths, CAPACITY, seed)
    fewest = max(math.ceil(int(lengths.sum()) / CAPACITY), int((lengths > CAPACITY // 2).sum()))
    assert packing.num_packs >= fewest
    used = sorted(int(lengths[pack].sum()) for pack in packs_of(packing))
    assert len(used) < 2 or used[0] + used[1] > CAPACITY


def test_long_documents_are_packed_with_those_that_fill_the_rest() -> None:
    lengths = np.array([60, 30, 20, 4, 34, 44], dtype=np.int32)
    packs = packs_of(pack_documents(lengths, CAPACITY, seed=0))
    assert sorted(packs) == [[0, 3], [1, 4], [2, 5]]


def test_the_longest_document_that_has_room_is_added() -> None:
    """20 fits next to 40 and next to 44; next to 44 it fills the pack completely."""
    lengths = np.array([40, 44, 20], dtype=np.int32)
    assert [1, 2] in packs_of(pack_documents(lengths, CAPACITY, seed=0))


@pytest.mark.parametrize(("mean", "spread"), [(5.6, 0.7), (4.8, 0.5), (math.log(128), 0.03)])
def test_real_lengths_fill_995_of_1000_positions_in_seconds(mean: float, spread: float) -> None:
    generator = np.random.Generator(np.random.Philox(key=7))
    lengths = np.clip(generator.lognormal(mean, spread, 100_000), 8, 2048).astype(np.int32)
    started = time.process_time()
    packing = pack_documents(lengths, 2048, seed=0)
    seconds = time.process_time() - started
    efficiency = int(lengths.sum(dtype=np.int64)) / (packing.num_packs * 2048)
    assert efficiency >= (0.999 if spread > 0.1 else 0.995)
    assert seconds < 10, "a second on an idle core"


def test_packs_mix_documents_of_all_lengths() -> None:
    """In decreasing order, the lengths of a pack vary a quarter as much as those of the data."""
    generator = np.random.Generator(np.random.Philox(key=7))
    lengths = np.clip(generator.lognormal(4.8, 0.5, 5000), 8, 2048).astype(np.int32)
    logs = np.log(lengths)
    within = [float(logs[pack].var()) for pack in packs_of(pack_documents(lengths, 2048, seed=0))]
    assert np.mean(within) > 0.8 * logs.var()


def test_packs_depend_on_the_seed_alone() -> None:
    lengths = np.arange(1, 60, dtype=np.int32)
    one, other = (packs_of(pack_documents(lengths, CAPACITY, seed)) for seed in (0, 1))
    assert one != other
    assert one == packs_of(pack_documents(lengths, CAPACITY, seed=0))


def test_packs_are_not_in_order_of_their_longest_document() -> None:
    lengths = np.arange(1, 60, dtype=np.int32)
    longest = [int(lengths[pack].max()) for pack in packs_of(pack_documents(lengths, CAPACITY, seed=0))]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)


def test_no_documents_no_packs() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    assert pack_documents(nothing, CAPACITY, 0).num_packs == 0
    assert pack_one_per_sequence(nothing).num_packs == 0


def test_document_longer_than_the_capacity_raises() -> None:
    with pytest.raises(ValueError, match="truncate them before packing"):
        pack_documents(np.array([65], dtype=np.int32), CAPACITY, 0)


def test_singly_keeps_rows_in_order() -> None:
    assert packs_of(pack_one_per_sequence(np.array([5, 3, 9], dtype=np.int32))) == [[0], [1], [2]]
