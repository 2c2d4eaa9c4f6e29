"""The TypeScript judge: references pass, planted type errors fail."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.judges.base import ReferenceRow, Verdict
from launcher.judges.node_tools import NODE_DIR_VARIABLE
from launcher.judges.typescript.judge import TypescriptJudge
from launcher.judges.typescript.syntax import _make_parser
from tests.unit.judges.typescript.typescript_rows import FILM, ask_about_films, needs_compiler, sample

pytestmark = pytest.mark.process

pytest.importorskip("tree_sitter_typescript")
KEEP = "function keep(films: Film[]): Film[] {\n  return films.filter((film) => film.year >= 1990);\n}"


def ask(judge: TypescriptJudge, answer: str, reference: str = KEEP) -> Verdict:
    return judge.judge([ask_about_films(reference)], [answer])[0]


@needs_compiler
def test_references_pass_every_check(judge: TypescriptJudge) -> None:
    rows = sample("test", 28)  # each kind of row about once
    verdicts = judge.judge(rows, [row.reference for row in rows])
    assert [one for one in verdicts if set(one.checks.values()) != {True} or one.reason] == []


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_all_references_pass_every_check(judge: TypescriptJudge, name: str) -> None:
    rows = sample(name)
    verdicts = judge.judge(rows, [row.reference for row in rows])
    assert [one for one in verdicts if set(one.checks.values()) != {True} or one.reason] == []


PLANTED = {
    "unknown name": KEEP.replace("films.filter", "filmz.filter"),
    "unknown property": KEEP.replace("film.year", "film.yaer"),
    "unknown type": KEEP.replace("Film[])", "Movie[])"),
    "wrong result": KEEP.replace(": Film[] {", ": string {"),
    "wrong literal": KEEP.replace("film.year >= 1990", 'film.genre === "folk"'),
    "maybe undefined": KEEP.replace("film.year >= 1990", "film.note.length > 1"),
    "implicit any": "function keep(films) { return films; }",
    "not callable": KEEP.replace("films.filter(", "films.length("),
    "too few arguments": KEEP.replace("(film) => film.year >= 1990", ""),
    "missing return": "function keep(films: Film[]): Film[] { if (films.length) { return films; } }",
    "assigned to a constant": "const keep = (films: Film[]): Film[] => films;\nkeep = (films) => films;",
    "missing property": 'const keep: Film = { id: 1, title: "a", year: 1 };',
    "excess property": 'const keep: Film = { id: 1, title: "a", year: 1, genre: "jazz", more: 1 };',
    "null": "const keep: Film[] = null;",
    "unsound guard": "function keep(films: unknown): Film[] { return films; }",
    "unreadable property": "class Keep { private n = 1 }\nconst keep = new Keep().n;",
    "no overlap": KEEP.replace(">= 1990", '=== "1990"'),
    "await outside": "function keep(p: Promise<Film[]>): Film[] { return await p; }",
    "twice": f"{KEEP}\n{KEEP}",
    "another interface": f"interface Film {{ year: string }}\n{KEEP}",
    "not everything is returned": "function keep(f: Film): number { switch (f.genre) { case 'jazz': return 1; } }",
    "an import": f'import fs from "fs";\n{KEEP}',
    "a browser": f"{KEEP}\ndocument.title;",
    "excused": f"// @ts-nocheck\n{KEEP.replace('films.filter', 'filmz.filter')}",
    "excused line": KEEP.replace("  return", "  // @ts-ignore\n  return").replace("film.year", "film.yaer"),
    "expected": KEEP.replace("  return", "  // @ts-expect-error\n  return").replace("film.year", "film.yaer"),
    "readonly": "function keep(films: readonly Film[]): Film[] { return films.sort(); }",
    "wrong argument": f"{KEEP}\nkeep([1]);",
    "generic": "const keep = new Map<string, Film>([[1, 2]]);",
}


@needs_compiler
def test_every_planted_type_error_is_found(judge: TypescriptJudge) -> None:
    """In one batch: none hides another."""
    verdicts = judge.judge([ask_about_films(KEEP)] * len(PLANTED), list(PLANTED.values()))
    passed = [name for name, verdict in zip(PLANTED, verdicts, strict=True) if verdict.checks["types"] is not False]
    assert passed == []
    assert all(verdict.checks["parses"] for verdict in verdicts)
    assert all(verdict.reason.startswith("does not type-check: ") for verdict in verdicts)


@needs_compiler
def test_a_syntax_error_does_not_keep_others_from_being_checked(judge: TypescriptJudge) -> None:
    answers = ["function keep( {", PLANTED["unknown name"], KEEP]
    broken, wrong, right = judge.judge([ask_about_films(KEEP)] * 3, answers)
    assert set(broken.checks.values()) == {False}
    assert wrong.checks["types"] is False
    assert set(right.checks.values()) == {True}


@needs_compiler
def test_what_one_answer_declares_for_all_is_not_seen_by_others(judge: TypescriptJudge) -> None:
    answers = [
        f"declare global {{ var filmz: Film[] }}\n{KEEP}",
        PLANTED["unknown name"],
        f"interface Other {{}}\n{KEEP}",
    ]
    assert [one.checks["types"] for one in judge.judge([ask_about_films(KEEP)] * 3, answers)] == [True, False, True]


@needs_compiler
@pytest.mark.parametrize(
    "answer",
    [
        f"{FILM}\n\n{KEEP}",
        f"export {FILM}\n\nexport {KEEP}",
        f"/* both */ export default {KEEP.replace(chr(34), chr(39))}",
        f"```ts\n{KEEP}\n```",
        KEEP.replace("(film)", "film").replace(";", "").replace("\n", "\n\n  // why\n"),
    ],
)
def test_repeated_types_exports_fences_and_formatting_are_no_mistakes(judge: TypescriptJudge, answer: str) -> None:
    verdict = ask(judge, answer)
    assert verdict.checks["types"] is True
    assert verdict.checks["behaves"] is True


@needs_compiler
def test_types_of_a_fenced_block_or_of_the_context_are_given(judge: TypescriptJudge) -> None:
    fenced = ReferenceRow(instruction=f"Given\n\n```ts\n{FILM}\n```\n\nwrite keep.", context="", reference=KEEP)
    in_context = ReferenceRow(instruction="Write keep.\n\nIt is easy.", context=FILM, reference=KEEP)
    assert [one.checks["types"] for one in judge.judge([fenced, in_context], [KEEP, KEEP])] == [True, True]


@needs_compiler
@pytest.mark.parametrize(
    "reference", ['import { x } from "y";\nexport const z = x;', "export const t = document.title;", "const a: = 1"]
)
def test_types_are_not_judged_if_the_reference_has_type_errors(judge: TypescriptJudge, reference: str) -> None:
    verdict = ask(judge, "const z = 1;", reference)
    assert dict(verdict.checks) == {"parses": True, "types": None, "behaves": None, "equal": False}


@needs_compiler
@pytest.mark.parametrize(
    "answer",
    ["", " \n", "// nothing", "function (", "Here it is:\n```ts\nlet a = 1\n```", "x" * 200_000, "let a = '\ud800'"],
)
def test_what_is_not_typescript_fails_every_check(judge: TypescriptJudge, answer: str) -> None:
    verdict = ask(judge, answer)
    assert set(verdict.checks.values()) == {False}
    assert verdict.reason.startswith("does not parse: ")


def test_without_node_the_tree_judges_and_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(NODE_DIR_VARIABLE, str(tmp_path))
    rows = sample("test")
    with TypescriptJudge() as judge:
        assert judge.main_check == "equal"
        assert re.fullmatch(r"tree-sitter-typescript \d.*", judge.checks[0].checker)
        assert "make quality-tools" in judge.checks[1].checker
        assert judge.checks[1].checker == judge.checks[2].checker
        verdicts = judge.judge(rows, [row.reference for row in rows])
        wanted = {"parses": True, "types": None, "behaves": None, "equal": True}
        assert [one for one in verdicts if dict(one.checks) != wanted] == []
        other = ask(judge, KEEP.replace("1990", "1991"))
        assert (other.checks["equal"], other.reason) == (False, "differs from the reference")
        unparsable = ask(judge, KEEP[:-1])
        assert dict(unparsable.checks) == {"parses": False, "types": None, "behaves": None, "equal": False}


@needs_compiler
def test_with_node_every_check_names_its_version(judge: TypescriptJudge) -> None:
    assert judge.main_check == "behaves"
    assert [check.name for check in judge.checks] == ["parses", "types", "behaves", "equal"]
    assert all(re.search(r"\d+\.\d+\.\d+", check.checker) for check in judge.checks)


def test_missing_package_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_typescript", None)
    _make_parser.cache_clear()
    with pytest.raises(InputError) as caught:
        TypescriptJudge()
    assert "pip install 'expert-launcher[quality]'" in str(caught.value)
