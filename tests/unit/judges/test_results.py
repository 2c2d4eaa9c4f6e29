"""Comparison of stored evaluations: refusals and warnings."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.judges.base import Check, Verdict
from launcher.judges.results import AnswerResult, EvalResult, compare_results, load_result, summarize_checks


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
        checks=summarize_checks(checks, verdicts),
        answers=answers,
        greedy=True,
        seed=1,
        max_new_tokens=8,
        seconds=1.0,
        judging_seconds=1.0,
        versions={},
        made_at="2026-11-15",
    )


def test_unjudged_answers_are_not_counted() -> None:
    result = make_result({"a": True, "b": None, "c": False})
    assert (result.main.num_passed, result.main.num_judged, result.main.rate) == (1, 2, 0.5)


def test_rows_are_matched_by_key() -> None:
    before = make_result({"a": True, "b": True, "c": False})
    now = make_result({"d": True, "c": True, "a": False}, checker="sqlglot 2")
    change, warnings = compare_results(before, now)
    assert (change.num_rows, change.num_lost, change.num_won) == (2, 1, 1)
    assert warnings == (
        "2 rows in common, of 3 before and 3 now",
        "judged by sqlglot 1 before, by sqlglot 2 now",
    )


def test_different_decoding_is_a_warning() -> None:
    one = make_result({"a": True, "b": True})
    for before, now, words in (
        (one, one.model_copy(update={"greedy": False}), "greedy answers before, sampled now"),
        (
            one.model_copy(update={"max_new_tokens": 512}),
            one,
            "at most 512 new tokens before, 8 now: the lower limit cut off 2 of 2 answers",
        ),
    ):
        assert compare_results(before, now)[1] == (words,)
    ended = one.model_copy(update={"answers": tuple(each.model_copy(update={"end": "stop"}) for each in one.answers)})
    assert compare_results(one.model_copy(update={"max_new_tokens": 512}), ended)[1] == ()


def test_results_of_different_experts_or_checks_are_refused() -> None:
    one = make_result({"a": True})
    with pytest.raises(InputError, match="of different experts or checks"):
        compare_results(make_result({"a": True}, expert="json"), one)
    with pytest.raises(InputError, match="no row in common"):
        compare_results(make_result({"b": True}), one)


def test_invalid_result_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_result(file)
    file.write_text("{}")
    with pytest.raises(InputError, match="not the result of an evaluation"):
        load_result(file)
    file.write_text(make_result({"a": True}).model_copy(update={"main_check": "other"}).model_dump_json())
    with pytest.raises(InputError, match="not the result of an evaluation"):
        load_result(file)
    file.write_text(make_result({"a": True}).model_dump_json())
    assert load_result(file) == make_result({"a": True})


def test_too_few_shared_rows_are_refused() -> None:
    """A quick look before would otherwise open it."""
    now = make_result({str(index): False for index in range(40)})
    with pytest.raises(InputError, match="only 2 rows in common, of 2 before and 40 now"):
        compare_results(make_result({"0": True, "1": True}), now)
    change, warnings = compare_results(now, make_result({"0": True, "1": True}))
    assert change.num_rows == 2
    assert warnings == ("2 rows in common, of 40 before and 2 now",)
