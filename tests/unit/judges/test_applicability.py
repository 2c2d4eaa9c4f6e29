"""Which checks apply to a row depends on the row only: never on whether an answer parses, or is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launcher.judges.base import Judge, ReferenceRow, Verdict
from launcher.judges.cypher.judge import CypherJudge
from launcher.judges.json_value.judge import JsonJudge
from launcher.judges.sql.judge import SqlJudge
from launcher.judges.typescript import judge as typescript
from launcher.judges.typescript.judge import TypescriptJudge
from tests.conftest import ROOT

pytestmark = pytest.mark.process

NUM_SAMPLES = 2
FIELDS = {
    "neo4j": ("question", "schema", "cypher"),
    "json": ("text", "schema", "json"),
    "sql": ("sql_prompt", "sql_context", "sql"),
    "typescript": ("instruction", "", "output"),
}
# Neither text is right for any row.
TEXTS = (
    "",
    "   ",
    "```\n```",
    "this is not code {{{ (",
    "\ud800",
    "x" * 120_000,
    "/* only a comment",
    "null",
    "[" * 300,
)
WRONG = {
    "neo4j": ("MATCH (n) RETURN n", "MATCH (n:Missing) RETURN n.nothing", "MATCH (n) DELETE n", "RETURN 1"),
    "json": ("{}", "[1, 2]", '"text"', "1e400", '{"a": {"b": 1}}'),
    "sql": ("SELECT 1", "SELECT * FROM missing", "DROP TABLE x", "SELECT 1; SELECT 2"),
    "typescript": (
        "const a = 1;",
        "export function f(): number { return 'a'; }",
        "declare global { var x: number }",
        "while (true) {}",
    ),
}
SCHEMA = "Node properties:\nA {n: INTEGER}\nRelationships:\n(:A)-[:R]->(:A)"
ROWS: dict[str, list[tuple[str, str, str]]] = {
    "neo4j": [
        ("no schema", "", "MATCH (a:A) RETURN a.n"),
        ("", "not a schema", "MATCH (a:A) RETURN a.n"),
        ("never rows", SCHEMA, "MATCH (a:A) WHERE false RETURN a.n"),
        ("not in the engine", SCHEMA, "MATCH (a:A) RETURN elementId(a)"),
        ("writes", SCHEMA, "MATCH (a:A) SET a.n = 1"),
        ("calls", SCHEMA, "CALL db.labels() YIELD label RETURN label"),
        ("does not parse", SCHEMA, "MATCH (a:A RETURN"),
        ("twice", SCHEMA, "MATCH (a:A)-[:R]->(b:A)-[:R]->(c:A) RETURN c.n"),
    ],
    "json": [
        ("no schema", "", '{"a": 1}'),
        ("not a schema", "hello", '{"a": 1}'),
        ("violated by the reference", '{"type": "array"}', '{"a": 1}'),
        ("Fix this JSON: {a: 1", "", '{"a": 1}'),
        ("Fix this JSON: {a: 1", '{"type": "object"}', '{"a": 1}'),
        ("the reference does not parse", '{"type": "object"}', "{a: 1"),
        ("a reference to nowhere, met by objects only", '{"properties": {"z": {"$ref": "#/missing"}}}', '{"a": 1}'),
    ],
    "sql": [
        ("no tables", "", "SELECT name FROM products"),
        ("the reference does not run", "CREATE TABLE t (a INTEGER);", "SELECT b FROM t"),
        ("the reference does not parse", "CREATE TABLE t (a INTEGER);", "SELECT FROM"),
        ("never rows", "CREATE TABLE t (a INTEGER);", "SELECT a FROM t WHERE 1 = 0"),
        ("by chance", "CREATE TABLE t (a INTEGER);", "SELECT a FROM t ORDER BY random() LIMIT 1"),
        ("writes", "CREATE TABLE t (a INTEGER);", "DELETE FROM t"),
    ],
    "typescript": [
        ("types only", "", "interface A { a: number }"),
        ("browser", "", "export function f(): void { document.title = 'a'; }"),
        ("does not type-check", "", "export function f(): number { return 'a'; }"),
        ("cannot be compared", "", "export function f(): Promise<number> { return fetch('a').then(() => 1); }"),
        ("nothing", "", "const a = 1;"),
        ("does not parse", "", "function f( {"),
    ],
}  # fmt: skip


def load_rows(expert: str) -> Iterator[ReferenceRow]:
    names = FIELDS[expert]
    lines = (ROOT / f"experts/{expert}/sample/validation.jsonl").read_text().splitlines()[:NUM_SAMPLES]
    for line in lines:
        fields = json.loads(line)
        instruction, context, reference = (fields.get(name, "") for name in names)
        yield ReferenceRow(instruction=instruction, context=context, reference=reference)
    for instruction, context, reference in ROWS[expert]:
        yield ReferenceRow(instruction=instruction, context=context, reference=reference)


def make_typescript_judge() -> TypescriptJudge:
    """Endless answers take all the time that they get."""
    return TypescriptJudge(seconds=2.0)


def find_applicable(verdict: Verdict) -> set[str]:
    return {name for name, passed in verdict.checks.items() if passed is not None}


def check_rows(expert: str, judge: Judge, every: int) -> None:
    for index, row in enumerate(load_rows(expert)):
        answers = [
            row.reference,
            *(*TEXTS, *WRONG[expert], f"{row.reference}\n{row.reference}")[index % every :: every],
        ]
        verdicts = judge.judge([row] * len(answers), answers)
        expected = find_applicable(verdicts[0])
        for answer, verdict in zip(answers, verdicts, strict=True):
            assert find_applicable(verdict) == expected, (row, answer[:80], verdict)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("expert", "make_judge"),
    [("neo4j", CypherJudge), ("json", JsonJudge), ("sql", SqlJudge), ("typescript", make_typescript_judge)],
)
def test_applicable_checks_depend_on_the_row_only(expert: str, make_judge: Callable[[], Any], every: int) -> None:
    with make_judge() as judge:
        check_rows(expert, judge, every)


def test_without_node_or_an_engine_fewer_checks_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typescript, "find_typescript_tools", lambda: None)
    with TypescriptJudge() as judge:
        check_rows("typescript", judge, 1)
    with CypherJudge(("graphglot",), with_engine=False) as cypher:
        check_rows("neo4j", cypher, 1)
