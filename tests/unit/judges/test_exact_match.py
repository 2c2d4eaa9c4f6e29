"""The judge of labels and short texts."""

from __future__ import annotations

import pytest

from launcher.judges.base import ReferenceRow
from launcher.judges.exact_match import ExactMatchJudge
from launcher.judges.registry import _CHECK_NAMES, open_judge_by_name
from launcher.new_expert.answer_language import detect_language


@pytest.mark.parametrize(
    ("reference", "answer", "matches", "equal"),
    [
        ("billing", "billing", True, True),
        ("billing", " billing\n", True, True),
        ("billing", "Billing.", True, False),
        ("Out of  stock", "out of stock", True, False),
        ("Größe", "GRÖSSE", True, False),
        ("42", "42", True, True),
        ("-1", "1", False, False),
        ("50%", "50", False, False),
        ("yes", "**Yes!**", True, False),
        ("yes", "\u201cYes\u201d", True, False),
        ("it\u2019s late", "It's late.", True, False),
        ("yes", "```\nyes\n```", True, True),
        ("x\u00b2", "x2", False, False),
        ("10\u00b2", "102", False, False),
        (".5", "5", False, False),
        ("A*", "A", False, False),
        (".NET", "net", False, False),
        ("5'", '5"', False, False),
        ("\uff11\uff10", "10", True, False),
        ("caf\u00e9", "cafe\u0301", True, False),
        ("?", "!", False, False),
        ("?", "?", True, True),
        ("billing", "shipping", False, False),
        ("billing", "billing shipping", False, False),
        ("billing", "", False, False),
        ("", "", True, True),
        ("billing", "x" * 200_000, False, False),
    ],
)
def test_texts_are_compared(reference: str, answer: str, matches: bool, equal: bool) -> None:
    with ExactMatchJudge() as judge:
        (verdict,) = judge.judge([ReferenceRow(instruction="", context="", reference=reference)], [answer])
        assert verdict.checks == {"matches": matches, "equal": equal}
        assert bool(verdict.reason) == (not (matches and equal))
        assert judge.main_check == "matches"


def test_checks_are_known_to_the_plan() -> None:
    with ExactMatchJudge() as judge:
        assert tuple(check.name for check in judge.checks) == _CHECK_NAMES["exact_match"]
    open_judge_by_name("exact_match").close()


def questions(answers: list[str]) -> list[ReferenceRow]:
    return [ReferenceRow(instruction=f"q{index}", context="", reference=answer) for index, answer in enumerate(answers)]


def test_labels_get_this_judge() -> None:
    found = detect_language(questions(["billing", "shipping", "returns"] * 10))
    assert found is not None
    assert found.name == "exact_match"
    assert "3 different answers" in found.reason


@pytest.mark.parametrize(
    "answers",
    [
        [f"A long answer that explains something to customer {index} in its own words." for index in range(30)],
        [f"answer {index}" for index in range(30)],
        ["yes", "no"] * 2,
        ["first line\nsecond line"] * 30,
    ],
)
def test_free_text_gets_none(answers: list[str]) -> None:
    assert detect_language(questions(answers)) is None
