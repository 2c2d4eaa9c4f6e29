from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.manifest.suggest import edit_distance, find_closest, find_typo

words = st.text("abc_", max_size=8)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("a", "", 1), ("bacth", "batch", 1), ("rank", "rnk", 1), ("alpha", "alhpaa", 2), ("ab", "cd", 2)],
)
def test_edit_distance_of_examples(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == distance


@given(words, words)
def test_distance_is_symmetric_and_bounded(a: str, b: str) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) <= max(len(a), len(b))
    assert (edit_distance(a, b) == 0) == (a == b)


def test_closest_known_word_is_suggested() -> None:
    assert find_closest("eavl_steps", ["save_steps", "eval_steps", "max_steps"]) == "eval_steps"
    assert find_closest("Packing", ["packing"]) == "packing"


def test_distant_words_are_not_suggested() -> None:
    assert find_closest("xyzzy", ["packing", "rank"]) is None
    assert find_closest("r", []) is None


def test_typo_is_at_distance_one() -> None:
    assert find_typo("trian", ["test", "train"]) == "train"
    assert find_typo("train", ["train"]) is None
    assert find_typo("trina_", ["train"]) is None
