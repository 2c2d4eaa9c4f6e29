"""Hostile Cypher answers fail within seconds and without side effects."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from launcher.judges.base import ReferenceRow
from launcher.judges.cypher import execution_match
from launcher.judges.cypher.execution_match import Engine, _shrink_counts, _shrink_limits
from launcher.judges.cypher.judge import CypherJudge
from launcher.judges.cypher.lexer import split_tokens
from launcher.judges.cypher.schema import load_graph_schema
from launcher.judges.cypher.syntax import ANALYSER, SyntaxChecker, open_syntax_checker
from launcher.judges.node_tools import find_node, find_package
from launcher.judges.worker import make_python_worker
from tests.unit.judges.cypher.conftest import JudgeOf
from tests.unit.judges.cypher.test_cypher import REFERENCE, SCHEMA
from tests.unit.judges.verdicts import passes_all

pytestmark = pytest.mark.process

pytest.importorskip("graphglot")
pytest.importorskip("ladybug")
HAS_NODE = find_package(ANALYSER) is not None and find_node() is not None

HOSTILE = {
    "load csv": "LOAD CSV FROM 'file:///etc/passwd' AS line RETURN line",
    "apoc": "CALL apoc.load.json('http://localhost:1/x') YIELD value RETURN value",
    "dbms": "CALL dbms.listConfig() YIELD name RETURN name",
    "create": "CREATE (a:Actor {name: 'x'}) RETURN a.name",
    "delete": "MATCH (n) DETACH DELETE n",
    "set": "MATCH (a:Actor) SET a.name = 'x' RETURN a.name",
    "drop": "DROP INDEX films IF EXISTS",
    "copy": "COPY Actor FROM '/etc/passwd'",
    "export": "EXPORT DATABASE '/tmp/there'",
    "two": f"{REFERENCE}; MATCH (n) DETACH DELETE n",
    "ten megabytes": "MATCH (a:Actor) WHERE a.name = '" + "x" * 10_000_000 + "' RETURN a.name",
    "long": "MATCH (a:Actor) WHERE a.name = '" + "x" * 19_000 + "' RETURN a.name",
    "deep brackets": "RETURN " + "(" * 9_000 + "1" + ")" * 9_000,
    "deep lists": "RETURN " + "[" * 4_000 + "]" * 4_000,
    "deep subqueries": "MATCH (a) WHERE " + "EXISTS { MATCH (a) WHERE " * 300 + "true" + "}" * 300 + " RETURN a.name",
    "many not": "RETURN " + "NOT " * 4_500 + "true",
    "many keys": "RETURN {" + ", ".join(f"k{number}: 1" for number in range(1_500)) + "}",
    "many aliases": f"RETURN {'1 + ' * 25}1 AS a ORDER BY {', '.join(['a'] * 3_000)}",
    "many quotes": "RETURN '" + "\\'" * 9_000,
    "deep, but not too deep": "RETURN " + "(" * 49 + "1" + ")" * 49,
    "many keys, but not too many": "RETURN {" + ", ".join(f"k{number}: 1" for number in range(450)) + "}",
    "many comments": "/*" * 9_000,
    "surrogate": "MATCH (a:Actor) RETURN a.name\udc80",
    "nul": "MATCH (a:Actor) RETURN a.name\0",
    "bytes": b"MATCH (a) RETURN \xff\xfe".decode("latin-1"),
    "empty": "",
    "blank": " \n\t ",
    "fence": "```cypher\n```",
    "two fences": "```cypher\nMATCH (a:Actor) RETURN a\n```\n```cypher\nMATCH (f:Film) RETURN f\n```",
    "expansion": "MATCH (a)-[*]-(b), (c)-[*]-(d), (e)-[*]-(f), (g)-[*]-(h) RETURN count(*)",
    "product": "MATCH " + ", ".join(f"(n{number})" for number in range(40)) + " RETURN count(*)",
    "range": "UNWIND range(1, 10000000000) AS x UNWIND range(1, 10000000000) AS y RETURN count(*)",
    "escape": "MATCH (a:Actor) RETURN a.name \x1b]0;x\x07",
}


# Of a query in the engine, instead of 2000: some answers take all the time that they get.
LIMIT = "from launcher.judges.cypher import engine_worker; engine_worker._MILLISECONDS = 500"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    opened = Engine()
    opened._worker = make_python_worker(
        f"{LIMIT}; engine_worker.serve()", seconds=execution_match._SECONDS, memory_mib=execution_match._MEMORY_MIB
    )
    yield opened
    opened.close()


@pytest.fixture(scope="module", params=["graphglot", *(["node"] if HAS_NODE else [])])
def judge(request: pytest.FixtureRequest, judge_of: JudgeOf, engine: Engine) -> Iterator[CypherJudge]:
    opened = judge_of(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened, "_engine", engine)
        yield opened


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answer_is_rejected(judge: CypherJudge, name: str) -> None:
    begun = time.monotonic()
    row = ReferenceRow(instruction="", context=SCHEMA, reference=REFERENCE)
    hostile, decent = judge.judge([row, row], [HOSTILE[name], REFERENCE])
    assert hostile.checks["matches"] is False
    assert hostile.reason
    assert passes_all(decent), decent
    assert time.monotonic() - begun < 60


def test_a_reference_full_of_brackets(judge: CypherJudge) -> None:
    """Nothing that a row holds breaks the judge either."""
    rows = [
        ReferenceRow(instruction="", context=context, reference=reference)
        for context in ("", "(" * 50_000, "- **" * 20_000, "A {" * 20_000, SCHEMA)
        for reference in ("", "(" * 8_000, "'" * 999)
    ]
    begun = time.monotonic()
    verdicts = judge.judge(rows, [REFERENCE] * len(rows))
    assert not any(verdict.checks["matches"] for verdict in verdicts)
    assert time.monotonic() - begun < 60


def test_the_engine_is_bounded(engine: Engine) -> None:
    """Asked directly, past all checks: it gives up, and the next question is answered."""
    schema = load_graph_schema(SCHEMA)
    assert schema is not None
    for name in ("expansion", "product", "range"):
        begun = time.monotonic()
        outcome = engine.compare(schema, split_tokens(HOSTILE[name]), split_tokens(HOSTILE[name] + " LIMIT 1"))
        assert outcome.same is not False
        assert time.monotonic() - begun < 60
    assert engine.compare(schema, split_tokens(REFERENCE), split_tokens(REFERENCE)).same is True


@pytest.mark.skipif(not HAS_NODE, reason="Node or the analyser is missing")
def test_syntax_checker_restarts_after_it_was_killed() -> None:
    analyser = open_syntax_checker(("node",))
    try:
        analyser._worker.seconds = 0.001
        assert "timed out" in analyser.find_fault("MATCH (a) RETURN a.name")
        analyser._worker.seconds = 10
        assert "not defined" in analyser.find_fault("MATCH (a) RETURN b")
        assert analyser.find_fault("MATCH (a) RETURN a.born") == ""
    finally:
        analyser.close()


DIES_AFTER_ONE = """
import json, os, sys
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    if number or "fatal" in line:
        os._exit(3)
    print(json.dumps(f"process {os.getpid()}"), flush=True)
"""


def test_a_query_that_fails_in_a_used_process_gets_a_new_one() -> None:
    worker = make_python_worker(f"exec({DIES_AFTER_ONE!r})", seconds=10, memory_mib=256)
    checker = SyntaxChecker("a checker", worker)
    try:
        faults = [checker.find_fault(query) for query in ("RETURN 1", "RETURN 2", "RETURN 'fatal'", "RETURN 3")]
        assert len(set(faults)) == 4
        assert [fault.split()[0] for fault in faults] == ["process", "process", "the", "process"]
        assert faults[2] == "the analyser exited with code 3"
    finally:
        checker.close()


@pytest.mark.parametrize(
    "query",
    [
        "MATCH (a:A) WITH a LIMIT {} RETURN a",
        "MATCH (a:A)-[:R]->(b) WITH a, count(b) AS n WHERE n > {} RETURN a",
    ],
)
def test_numbers_with_thousands_of_digits_are_large(query: str) -> None:
    """Python refuses to parse them."""
    plain, huge = split_tokens(query.format(5)), split_tokens(query.format("9" * 5000))
    shrunk = _shrink_limits(_shrink_counts([plain, huge]))[1]
    assert max(len(token.text) for token in shrunk) < 10
