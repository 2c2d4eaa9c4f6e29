"""The language of answers is detected by patterns, then checked by the real judge."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.judges.base import ReferenceRow
from launcher.new_expert.answer_language import LANGUAGES, check_language, detect_language, match_language
from tests.conftest import ROOT

TABLES = "CREATE TABLE t (id INTEGER, name TEXT);"


def ask(reference: str, context: str = "") -> ReferenceRow:
    return ReferenceRow(instruction="?", context=context, reference=reference)


@pytest.mark.parametrize(
    ("answer", "language"),
    [
        ('{"a": 1}', "json"),
        ("[1, 2]", "json"),
        ("```json\n{}\n```", "json"),
        ("SELECT name FROM t", "sql"),
        ("  -- all\nselect 1", "sql"),
        ("WITH x AS (SELECT 1) SELECT * FROM x", "sql"),
        ("INSERT INTO t VALUES (1)", "sql"),
        ("CREATE TABLE t (id INTEGER)", "sql"),
        ("UPDATE t SET name = 'x'", "sql"),
        ("MATCH (n:Movie) RETURN n", "cypher"),
        ("OPTIONAL MATCH (n) RETURN n.name", "cypher"),
        ("WITH 1 AS x MATCH (n) RETURN n, x", "cypher"),
        ("CREATE (n:Movie {title: 'x'}) RETURN n", "cypher"),
        ("interface A { name: string }", "typescript"),
        ("const add = (a: number, b: number): number => a + b;", "typescript"),
        ("export type Id = string | number;", "typescript"),
        ("42", None),
        ('"just a string"', None),
        ("Select the second one from the list, please.", "sql"),  # matches the pattern; the judge rejects it
        ("The movie is called Alien.", None),
        ("Call me (maybe) later", None),
        ("def add(a, b):\n    return a + b", None),
        ("positive", None),
        ("", None),
    ],
)
def test_patterns_recognise_languages(answer: str, language: str | None) -> None:
    guessed = match_language([answer])
    assert (None if guessed is None else guessed[0]) == language


def test_four_of_five_answers_must_match() -> None:
    assert match_language(["SELECT 1"] * 9 + ["no idea"]) == ("sql", 9)
    assert match_language(["SELECT 1"] * 7 + ["no idea"] * 3) is None
    assert match_language([]) is None


def test_answers_that_do_not_parse_are_rejected() -> None:
    prose = [ask("Select the second one from the list, please.")] * 5
    assert detect_language(prose) is None
    found = detect_language([ask("SELECT name FROM t", TABLES)] * 5)
    assert found is not None
    assert (found.name, found.notes) == ("sql", ())
    assert found.reason.startswith("5 of 5 answers look like it; 5 of 5 parse (sqlglot")


def test_answers_that_the_judge_cannot_decide_are_noted() -> None:
    found = detect_language([ask("SELECT name FROM t")] * 3)
    assert found is not None
    assert "the judge can decide correctness (result) for 0 of 3 rows" in found.notes[0]
    assert found.notes[0].endswith("; --task exact_match compares answers as text instead")


def test_judge_that_cannot_be_loaded_is_noted() -> None:
    found = check_language("missing.package:Judge", [ask("x")], "set by --task")
    assert found is not None
    assert "answers were not parsed" in found.notes[0]


@pytest.mark.parametrize("expert", ["json", "sql", "neo4j", "typescript"])
def test_samples_of_our_experts_are_recognised(expert: str) -> None:
    lines = (ROOT / "experts" / expert / "sample/train.jsonl").read_text(encoding="utf-8").splitlines()[:50]
    manifest = json.loads((ROOT / "experts" / expert / "manifest.json").read_text(encoding="utf-8"))
    mapping = manifest["training"]["dataset"].get("field_mapping", {})
    name = mapping.get("response") or mapping.get("output") or "output"
    answers = [str(json.loads(line)[name]) for line in lines if name in json.loads(line)]
    guessed = match_language(answers)
    assert guessed is not None
    assert guessed[0] == {"neo4j": "cypher"}.get(expert, expert)


@given(st.lists(st.text(max_size=60), max_size=5))
def test_any_text_is_accepted(answers: list[str]) -> None:
    guessed = match_language(answers)
    assert guessed is None or (guessed[0] in LANGUAGES and 0 < guessed[1] <= len(answers))
