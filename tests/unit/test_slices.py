"""How many answers a training can afford."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="pip install 'expert-launcher[train]'")

from launcher.training.slices import Allowance, Pace, TaskSlice, bound_answer, choose_slice, load_slice, save_slice

QUICK = Pace(first_token_seconds=0.2, token_seconds=0.03, rows_at_once=64)
SLOW = Pace(first_token_seconds=1.0, token_seconds=0.5, rows_at_once=4)


def allow(seconds: float, times: int = 4, share: float = 0.05) -> Allowance:
    return Allowance(training_seconds=seconds, share=share, num_evaluations=times)


@pytest.mark.parametrize(
    ("pace", "allowance", "expected"),
    [
        (QUICK, allow(10_000), (64, False)),  # all of them, all the time
        (SLOW, allow(70_000), (64, False)),
        (SLOW, allow(40_000), (32, False)),  # fewer rows before fewer evaluations
        (SLOW, allow(10_000), (8, False)),
        (SLOW, allow(9_000, times=100), (16, True)),  # at both ends only
        (QUICK, allow(100), None),
    ],
)
def test_what_a_share_of_the_time_allows(pace: Pace, allowance: Allowance, expected: tuple[int, bool] | None) -> None:
    chosen = choose_slice(64, 100, pace, allowance)
    assert (None if chosen is None else (chosen.num_rows, chosen.only_ends)) == expected
    if chosen is not None:
        times = 2 if chosen.only_ends else allowance.num_evaluations
        assert times * pace.predict(chosen.num_rows, 100) <= allowance.seconds


def test_few_rows_are_not_made_more() -> None:
    chosen = choose_slice(5, 100, QUICK, allow(10_000))
    assert chosen is not None
    assert chosen.num_rows == 5


def test_an_answer_ends_somewhere() -> None:
    assert bound_answer(40) == 58
    assert bound_answer(5000) == 512


def test_a_run_keeps_its_slice(tmp_path: Path) -> None:
    chosen = TaskSlice(num_rows=16, max_new_tokens=80, only_ends=True, why="so")
    file = tmp_path / "evaluations" / "slice.json"
    assert load_slice(file) is None
    save_slice(file, chosen)
    assert load_slice(file) == chosen
    file.write_text("{}")
    assert load_slice(file) is None  # damaged: chosen again


def test_judging_counts_too() -> None:
    judged = Pace(first_token_seconds=0.2, token_seconds=0.03, rows_at_once=64, judge_seconds=2.0, row_seconds=0.1)
    assert judged.predict(64, 100) == pytest.approx(QUICK.predict(64, 100) + 2.0 + 6.4)
