"""How many validation rows fit the time budget."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="pip install 'expert-launcher[train]'")

from launcher.training.evaluation.eval_budget import (
    GenerationSpeed,
    TaskSlice,
    TimeBudget,
    choose_slice,
    limit_new_tokens,
    load_slice,
    save_slice,
)

QUICK = GenerationSpeed(first_token_seconds=0.2, token_seconds=0.03, rows_at_once=64)
SLOW = GenerationSpeed(first_token_seconds=1.0, token_seconds=0.5, rows_at_once=4)


def make_budget(seconds: float, times: int = 4, share: float = 0.05) -> TimeBudget:
    return TimeBudget(training_seconds=seconds, share=share, num_evaluations=times)


@pytest.mark.parametrize(
    ("speed", "budget", "expected"),
    [
        (QUICK, make_budget(10_000), (64, False)),  # all rows, at every evaluation
        (SLOW, make_budget(70_000), (64, False)),
        (SLOW, make_budget(40_000), (32, False)),  # fewer rows before fewer evaluations
        (SLOW, make_budget(10_000), (8, False)),
        (SLOW, make_budget(9_000, times=100), (16, True)),  # first and last evaluation only
        (QUICK, make_budget(100), None),
    ],
)
def test_slice_fits_the_time_budget(
    speed: GenerationSpeed, budget: TimeBudget, expected: tuple[int, bool] | None
) -> None:
    chosen = choose_slice(64, 100, speed, budget)
    assert (None if chosen is None else (chosen.num_rows, chosen.only_ends)) == expected
    if chosen is not None:
        times = 2 if chosen.only_ends else budget.num_evaluations
        assert times * speed.predict(chosen.num_rows, 100) <= budget.seconds


def test_slice_has_at_most_the_available_rows() -> None:
    chosen = choose_slice(5, 100, QUICK, make_budget(10_000))
    assert chosen is not None
    assert chosen.num_rows == 5


def test_answer_length_is_limited() -> None:
    assert limit_new_tokens(40) == 58
    assert limit_new_tokens(5000) == 512


def test_slice_is_saved_and_loaded(tmp_path: Path) -> None:
    chosen = TaskSlice(num_rows=16, max_new_tokens=80, only_ends=True, why="so")
    file = tmp_path / "evaluations" / "slice.json"
    assert load_slice(file) is None
    save_slice(file, chosen)
    assert load_slice(file) == chosen
    file.write_text("{}")
    assert load_slice(file) is None  # damaged: chosen again


def test_judging_time_counts() -> None:
    judged = GenerationSpeed(
        first_token_seconds=0.2, token_seconds=0.03, rows_at_once=64, judge_seconds=2.0, row_seconds=0.1
    )
    assert judged.predict(64, 100) == pytest.approx(QUICK.predict(64, 100) + 2.0 + 6.4)
