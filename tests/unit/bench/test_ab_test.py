"""Order and size of the blocks of an A/B test."""

from __future__ import annotations

from launcher.bench.ab_test import interleave, make_block_size


def test_order_of_variants_alternates() -> None:
    assert [index for order in interleave(2, 4) for index in order] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert interleave(3, 2) == ((0, 1, 2), (2, 1, 0))


def test_linear_drift_affects_both_variants_equally() -> None:
    positions: dict[int, list[int]] = {0: [], 1: []}
    for position, index in enumerate(index for order in interleave(2, 6) for index in order):
        positions[index].append(position)
    assert sum(positions[0]) == sum(positions[1])


def test_blocks_have_the_same_sequences_for_all_global_batches() -> None:
    size = make_block_size([4, 8], warmup_steps=3, timed_steps=8)
    assert (size.warmup_sequences, size.timed_sequences, size.is_exact) == (24, 64, True)
    assert size.count_steps(4) == (6, 16)
    assert size.count_steps(8) == (3, 8)


def test_blocks_without_a_small_common_multiple_are_inexact() -> None:
    assert make_block_size([4, 6], warmup_steps=1, timed_steps=2).timed_sequences == 12
    size = make_block_size([31, 32], warmup_steps=1, timed_steps=2)
    assert (size.timed_sequences, size.is_exact) == (64, False)
    assert size.count_steps(31) == (2, 3)
