"""Sizes follow the rows: long enough for nearly all of them, small enough to make many steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.new_expert.sizes import choose_sizes


def test_many_short_rows() -> None:
    sizes = choose_sizes([350.0] * 1000, 35_946, 40_960)
    assert (sizes.max_seq_length, sizes.global_batch_size, sizes.epochs) == (2048, 48, 2.0)


def test_few_rows_make_small_steps_of_short_sequences() -> None:
    sizes = choose_sizes([130.0] * 150, 150, 40_960)
    assert (sizes.max_seq_length, sizes.global_batch_size, sizes.epochs) == (512, 2, 5.0)
    assert "few a step, because the rows are few" in sizes.batch_why


def test_long_rows_need_long_sequences() -> None:
    sizes = choose_sizes([100.0] * 90 + [5000.0] * 10, 100_000, 40_960)
    assert sizes.max_seq_length == 8192
    assert "cut" not in sizes.length_why


def test_a_base_with_few_positions_cuts_and_says_so() -> None:
    sizes = choose_sizes([5000.0] * 10, 100_000, 2048)
    assert sizes.max_seq_length == 2048
    assert "10 of 10 are longer and will be cut" in sizes.length_why


@given(
    st.lists(st.floats(1, 1e6), min_size=1, max_size=50),
    st.integers(2, 10**7),
    st.sampled_from([300, 512, 2048, 4096, 131_072]),
)
def test_sizes_are_always_possible(tokens: list[float], num_rows: int, positions: int) -> None:
    sizes = choose_sizes(tokens, num_rows, positions)
    assert sizes.max_seq_length <= positions
    assert sizes.global_batch_size >= 2
    assert sizes.epochs > 0
