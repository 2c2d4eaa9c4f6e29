from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.manifest.spelling import closest, edit_distance, is_swap

words = st.text("abc_", max_size=8)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("a", "", 1), ("bacth", "batch", 1), ("rank", "rnk", 1), ("alpha", "alhpaa", 2), ("ab", "cd", 2)],
)
def test_known_distances(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == distance


@given(words, words)
def test_distance_is_symmetric_and_bounded(a: str, b: str) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) <= max(len(a), len(b))
    assert (edit_distance(a, b) == 0) == (a == b)


def test_the_closest_known_word_wins() -> None:
    assert closest("eavl_steps", ["save_steps", "eval_steps", "max_steps"]) == "eval_steps"
    assert closest("Packing", ["packing"]) == "packing"


def test_nothing_is_suggested_that_is_too_far() -> None:
    assert closest("xyzzy", ["packing", "rank"]) is None
    assert closest("r", []) is None


def test_swaps() -> None:
    assert is_swap("cmr", "crm")
    assert not is_swap("cms", "crm")
    assert not is_swap("crm", "crm")
    assert not is_swap("mrc", "crm")
