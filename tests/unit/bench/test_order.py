"""Turns and blocks: every side as often, first as often as last, on the same sequences."""

from __future__ import annotations

from launcher.bench.order import interleave, make_course


def test_sides_take_turns_and_go_back() -> None:
    assert [side for turn in interleave(2, 4) for side in turn] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert interleave(3, 2) == ((0, 1, 2), (2, 1, 0))


def test_a_steady_drift_meets_both_sides_alike() -> None:
    places: dict[int, list[int]] = {0: [], 1: []}
    for place, side in enumerate(side for turn in interleave(2, 6) for side in turn):
        places[side].append(place)
    assert sum(places[0]) == sum(places[1])


def test_different_batches_train_the_same_sequences_in_other_steps() -> None:
    course = make_course([4, 8], warm_steps=3, timed_steps=8)
    assert (course.warm_sequences, course.timed_sequences, course.is_exact) == (24, 64, True)
    assert course.count_steps(4) == (6, 16)
    assert course.count_steps(8) == (3, 8)


def test_batches_that_share_no_multiple_nearby_say_so() -> None:
    assert make_course([4, 6], warm_steps=1, timed_steps=2).timed_sequences == 12
    course = make_course([31, 32], warm_steps=1, timed_steps=2)
    assert (course.timed_sequences, course.is_exact) == (64, False)
    assert course.count_steps(31) == (2, 3)
