"""Evaluations that cannot be compared say so; those that hardly can are compared with a word about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import InputError
from launcher.quality.judging import Check, Verdict
from launcher.quality.results import AnswerResult, EvalResult, compare_results, load_result, sum_up


def make_result(passed: dict[str, bool | None], checker: str = "sqlglot 1", expert: str = "sql") -> EvalResult:
    checks = (Check(name="result", title="right", checker=checker),)
    verdicts = [Verdict(checks={"result": one}) for one in passed.values()]
    answers = tuple(
        AnswerResult(
            key=key,
            instruction="?",
            reference="a",
            answer="b",
            checks={"result": one},
            reason="",
            num_tokens=1,
            end="length",
        )
        for key, one in passed.items()
    )
    return EvalResult(
        expert=expert,
        subject="run a",
        base="base",
        split="test",
        source="test.jsonl",
        num_rows=9,
        main_check="result",
        checks=sum_up(checks, verdicts),
        answers=answers,
        greedy=True,
        seed=1,
        max_new_tokens=8,
        seconds=1.0,
        judging_seconds=1.0,
        versions={},
        made_at="2026-11-15",
    )


def test_what_nobody_could_judge_counts_for_nothing() -> None:
    result = make_result({"a": True, "b": None, "c": False})
    assert (result.main.num_passed, result.main.num_judged, result.main.rate) == (1, 2, 0.5)


def test_rows_are_found_again_by_their_key() -> None:
    before = make_result({"a": True, "b": True, "c": False})
    now = make_result({"d": True, "c": True, "a": False}, checker="sqlglot 2")
    change, warnings = compare_results(before, now)
    assert (change.num_rows, change.num_lost, change.num_won) == (2, 1, 1)
    assert warnings == (
        "2 rows in common, of 3 before and 3 now",
        "judged by sqlglot 1 before, by sqlglot 2 now",
    )


def test_what_is_not_the_same_thing_is_refused() -> None:
    one = make_result({"a": True})
    with pytest.raises(InputError, match="not of the same thing"):
        compare_results(make_result({"a": True}, expert="json"), one)
    with pytest.raises(InputError, match="no row in common"):
        compare_results(make_result({"b": True}), one)


def test_what_is_no_result_is_told(tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_result(file)
    file.write_text("{}")
    with pytest.raises(InputError, match="not the result of an evaluation"):
        load_result(file)
    file.write_text(make_result({"a": True}).model_dump_json())
    assert load_result(file) == make_result({"a": True})


def test_a_handful_of_rows_is_no_gate() -> None:
    """A quick look before would otherwise open it."""
    now = make_result({str(index): False for index in range(40)})
    with pytest.raises(InputError, match="only 2 rows in common, of 2 before and 40 now"):
        compare_results(make_result({"0": True, "1": True}), now)
    change, warnings = compare_results(now, make_result({"0": True, "1": True}))
    assert change.num_rows == 2
    assert warnings == ("2 rows in common, of 40 before and 2 now",)
