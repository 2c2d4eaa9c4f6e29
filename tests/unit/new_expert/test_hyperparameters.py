"""Sequence length, batch size and epochs follow the number and lengths of the rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.new_expert.hyperparameters import choose_hyperparameters


def test_many_short_rows_get_the_usual_values() -> None:
    sizes = choose_hyperparameters([350.0] * 1000, 35_946, 40_960)
    assert (sizes.max_seq_length, sizes.global_batch_size, sizes.epochs) == (2048, 48, 2.0)


def test_few_rows_get_small_batches_of_short_sequences() -> None:
    sizes = choose_hyperparameters([130.0] * 150, 150, 40_960)
    assert (sizes.max_seq_length, sizes.global_batch_size, sizes.epochs) == (512, 2, 5.0)
    assert "small because the dataset is small" in sizes.batch_reason


def test_long_rows_get_long_sequences() -> None:
    sizes = choose_hyperparameters([100.0] * 90 + [5000.0] * 10, 100_000, 40_960)
    assert sizes.max_seq_length == 8192
    assert "truncated" not in sizes.length_reason


def test_truncated_rows_are_reported() -> None:
    sizes = choose_hyperparameters([5000.0] * 10, 100_000, 2048)
    assert sizes.max_seq_length == 2048
    assert "10 of 10 are longer and will be truncated" in sizes.length_reason


@given(
    st.lists(st.floats(1, 1e6), min_size=1, max_size=50),
    st.integers(2, 10**7),
    st.sampled_from([300, 512, 2048, 4096, 131_072]),
)
def test_values_are_always_valid(tokens: list[float], num_rows: int, positions: int) -> None:
    sizes = choose_hyperparameters(tokens, num_rows, positions)
    assert sizes.max_seq_length <= positions
    assert sizes.global_batch_size >= 2
    assert sizes.epochs > 0


def test_batch_reason_compares_different_numbers_of_steps_only() -> None:
    sizes = choose_hyperparameters([12.0] * 40, 40, 40_960)
    assert sizes.batch_reason == (
        "about 5 steps in total; an epoch is smaller than a batch; so few steps hardly train the model: add rows, "
        "or set epochs to 20 or more"
    )
