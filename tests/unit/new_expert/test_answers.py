"""In which language answers are: by their looks, and then by the real judge."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.new_expert.answers import LANGUAGES, ask_judge, find_language, guess_language
from launcher.quality.judging import Question
from tests.conftest import ROOT

TABLES = "CREATE TABLE t (id INTEGER, name TEXT);"


def ask(reference: str, context: str = "") -> Question:
    return Question(instruction="?", context=context, reference=reference)


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
        ("Select the second one from the list, please.", "sql"),  # looks like it; the judge will say no
        ("The movie is called Alien.", None),
        ("Call me (maybe) later", None),
        ("def add(a, b):\n    return a + b", None),
        ("positive", None),
        ("", None),
    ],
)
def test_looks(answer: str, language: str | None) -> None:
    guessed = guess_language([answer])
    assert (None if guessed is None else guessed[0]) == language


def test_some_others_do_not_matter_many_do() -> None:
    assert guess_language(["SELECT 1"] * 9 + ["no idea"]) == ("sql", 9)
    assert guess_language(["SELECT 1"] * 7 + ["no idea"] * 3) is None
    assert guess_language([]) is None


def test_the_judge_has_the_last_word() -> None:
    prose = [ask("Select the second one from the list, please.")] * 5
    assert find_language(prose) is None
    found = find_language([ask("SELECT name FROM t", TABLES)] * 5)
    assert found is not None
    assert (found.name, found.notes) == ("sql", ())
    assert found.why.startswith("5 of 5 answers look like it; 5 of 5 parse (sqlglot")


def test_it_is_said_what_the_judge_cannot_tell() -> None:
    found = find_language([ask("SELECT name FROM t")] * 3)
    assert found is not None
    assert "of 0 of 3 rows the judge can tell whether an answer is right (result)" in found.notes[0]


def test_a_judge_without_its_packages_is_named_all_the_same() -> None:
    found = ask_judge("nobody.at.home:Judge", [ask("x")], "as given")
    assert found is not None
    assert "nobody tried to parse them" in found.notes[0]


@pytest.mark.parametrize("expert", ["json", "sql", "neo4j", "typescript"])
def test_the_samples_of_our_experts_are_known(expert: str) -> None:
    lines = (ROOT / "experts" / expert / "sample/train.jsonl").read_text(encoding="utf-8").splitlines()[:50]
    manifest = json.loads((ROOT / "experts" / expert / "manifest.json").read_text(encoding="utf-8"))
    mapping = manifest["training"]["dataset"].get("field_mapping", {})
    name = mapping.get("response") or mapping.get("output") or "output"
    answers = [str(json.loads(line)[name]) for line in lines if name in json.loads(line)]
    guessed = guess_language(answers)
    assert guessed is not None
    assert guessed[0] == {"neo4j": "cypher"}.get(expert, expert)


@given(st.lists(st.text(max_size=60), max_size=5))
def test_no_text_is_too_odd(answers: list[str]) -> None:
    guessed = guess_language(answers)
    assert guessed is None or (guessed[0] in LANGUAGES and 0 < guessed[1] <= len(answers))
