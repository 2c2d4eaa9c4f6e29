"""The Cypher judge on our sample: references pass, planted faults fail, equivalent queries match."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from launcher.core.errors import InputError
from launcher.judges.base import ReferenceRow, Verdict
from launcher.judges.cypher.judge import CypherJudge
from launcher.judges.cypher.lexer import split_tokens
from launcher.judges.cypher.normalize import normalize_query
from launcher.judges.cypher.schema import load_graph_schema
from launcher.judges.cypher.schema_check import find_schema_faults
from launcher.judges.cypher.syntax import ANALYSER, open_syntax_checker
from launcher.judges.node_tools import INSTALL_HINT, find_node, find_package
from tests.conftest import ROOT
from tests.unit.judges.cypher.conftest import JudgeOf
from tests.unit.judges.cypher.cypher_mutants import other_meaning, same_meaning, wrong_directions, wrong_names
from tests.unit.judges.verdicts import passes_all

pytestmark = pytest.mark.process

pytest.importorskip("graphglot")
pytest.importorskip("ladybug")
needs_analyser = pytest.mark.skipif(find_package(ANALYSER) is None, reason=f"{ANALYSER} is missing; `{INSTALL_HINT}`")


def load_rows(*names: str) -> list[dict[str, str]]:
    folder = ROOT / "experts" / "neo4j" / "sample"
    lines = [line for name in names for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines]


def ask(row: dict[str, str]) -> ReferenceRow:
    return ReferenceRow(instruction=row["question"], context=row["schema"], reference=row["cypher"])


@pytest.fixture(scope="module")
def judge(judge_of: JudgeOf) -> CypherJudge:
    """With graphglot, which any machine has: what is tested here does not depend on who parses."""
    return judge_of("graphglot")


SCHEMA = """Node properties:
Film {title: STRING, year: INTEGER, released: DATE}
Actor {name: STRING, born: INTEGER}
Relationship properties:
PLAYED_IN {role: STRING}
Relationships:
(:Actor)-[:PLAYED_IN]->(:Film)
(:Film)-[:FOLLOWS]->(:Film)"""
REFERENCE = "MATCH (a:Actor)-[:PLAYED_IN]->(f:Film) WHERE f.year > 1990 RETURN a.name, f.title"


def give(judge: CypherJudge, answer: str, reference: str = REFERENCE, schema: str = SCHEMA) -> Verdict:
    (verdict,) = judge.judge([ReferenceRow(instruction="", context=schema, reference=reference)], [answer])
    return verdict


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_references_are_right(judge: CypherJudge, every: int) -> None:
    rows = load_rows("validation")[::every]
    wrong = [v.reason for v in judge.judge(list(map(ask, rows)), [row["cypher"] for row in rows]) if not passes_all(v)]
    assert not wrong


@needs_analyser
@pytest.mark.parametrize("backend", ["node", "racer"])
def test_references_are_right_for_neo4j(judge_of: JudgeOf, backend: str) -> None:
    if backend == "node" and find_node() is None:
        pytest.skip("no Node here")
    if backend == "racer":
        pytest.importorskip("py_mini_racer")
    rows = load_rows("test")[:3]
    judge = judge_of(backend)
    assert ANALYSER in judge.checks[0].checker
    assert all(passes_all(v) for v in judge.judge(list(map(ask, rows)), [row["cypher"] for row in rows]))
    assert give(judge, "MATCH (a:Actor) RETURN b.name").checks["parses"] is False


def test_no_false_alarm_on_any_row() -> None:
    for row in load_rows("train", "validation", "test"):
        schema = load_graph_schema(row["schema"])
        assert schema is not None
        faults = find_schema_faults(split_tokens(row["cypher"]), schema)
        assert not faults.names, row["cypher"]
        assert not faults.directions, row["cypher"]


def test_planted_names_and_directions_are_found() -> None:
    found: Counter[tuple[str, bool]] = Counter()
    dice = random.Random(7)
    for row in load_rows("train")[:600]:
        schema = load_graph_schema(row["schema"])
        assert schema is not None
        for kind, query in wrong_names(row["cypher"], schema, dice):
            found[kind, bool(find_schema_faults(split_tokens(query), schema).names)] += 1
        for query in wrong_directions(row["cypher"], schema):
            found["direction", bool(find_schema_faults(split_tokens(query), schema).directions)] += 1
    for kind in ("label", "type", "property", "foreign", "direction"):
        assert found[kind, True] > 150, kind
        assert found[kind, False] <= 0.005 * found[kind, True], kind


def test_equivalent_queries_match(judge: CypherJudge) -> None:
    rows = load_rows("test")[::12]
    pairs = [(ask(row), query) for row in rows for query in same_meaning(row["cypher"])]
    for (row, query), verdict in zip(pairs, judge.judge(*map(list, zip(*pairs, strict=True))), strict=True):
        assert verdict.checks["matches"], f"{query} | {row.reference} | {verdict.reason}"
    assert len(pairs) > 60


def test_different_queries_do_not_match(judge: CypherJudge) -> None:
    pairs = [(ask(row), query) for row in load_rows("validation")[::9] for query in other_meaning(row["cypher"])]
    verdicts = judge.judge(*map(list, zip(*pairs, strict=True)))
    passed = [query for (_, query), verdict in zip(pairs, verdicts, strict=True) if verdict.checks["matches"]]
    assert len(pairs) > 35
    assert len(passed) <= 0.03 * len(pairs), passed


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        ("", "parses"),
        ("MATCH (a:Actor RETURN a.name", "parses"),
        ("Sure! MATCH (a:Actor) RETURN a.name", "parses"),
        ("MATCH (a:Actor) RETURN capitalise(a.name)", "parses"),
        ("MATCH (a:Actor) RETURN a.name ORDER BY count(*)", "parses"),
        ("MATCH (a:Actor) SET a.born = 1 RETURN a.name", "reads"),
        ("MATCH (a:Actor) DETACH DELETE a", "reads"),
        ("MATCH (a:Actress)-[:PLAYED_IN]->(f:Film) RETURN a.name, f.title", "names"),
        ("MATCH (a:Actor)-[:ACTED_IN]->(f:Film) RETURN a.name, f.title", "names"),
        ("MATCH (a:Actor)-[:PLAYED_IN]->(f:Film) WHERE f.born > 1990 RETURN a.name, f.title", "names"),
        ("MATCH (a:Actor)-[r:PLAYED_IN]->(f:Film) WHERE r.part = 'x' RETURN a.name, f.title", "names"),
        ("MATCH (a:Actor)-[:PLAYED_IN]->(f) WHERE f.name = 'x' RETURN a.name, f.title", "names"),
        ("MATCH (a:Actor)<-[:PLAYED_IN]-(f:Film) WHERE f.year > 1990 RETURN a.name, f.title", "directions"),
        ("MATCH (a:Actor)-[:FOLLOWS]->(f:Film) WHERE f.year > 1990 RETURN a.name, f.title", "directions"),
        ("MATCH (a:Actor)-[:PLAYED_IN]->(f:Film) WHERE f.year >= 1990 RETURN a.name, f.title", "result"),
        ("MATCH (a:Actor)-[:PLAYED_IN]->(f:Film) WHERE f.year > 1990 RETURN DISTINCT a.name, f.title", "result"),
        ("MATCH (a:Actor)-[:PLAYED_IN]->(f:Film) WHERE f.year > 1990 RETURN f.title, a.name", "result"),
        ("MATCH (a:Actor)-[:PLAYED_IN]->(f:Film) WHERE f.year > 1990 RETURN a.name, f.title LIMIT 5", "result"),
        ("MATCH (f:Film)<-[:PLAYED_IN]-(a:Actor) WHERE 1990 < f.year RETURN a.name, f.title", "equal"),
        ("```cypher\nMATCH (x:Actor)-[:PLAYED_IN]->(f:Film) WHERE f.year > 1990 RETURN x.name AS a, f.title\n```", ""),
    ],
)
def test_invalid_answers_fail_the_right_checks(judge: CypherJudge, answer: str, failed: str) -> None:
    verdict = give(judge, answer)
    first = next((name for name, passed in verdict.checks.items() if passed is False), "")
    assert first == failed, verdict
    assert bool(verdict.reason) == bool(failed)
    assert verdict.checks["matches"] is (failed in ("", "equal"))
    assert list(verdict.checks) == [check.name for check in judge.checks]


def test_a_reference_that_writes_lets_the_answer_write(judge: CypherJudge) -> None:
    writes = "CREATE (f:Film {title: 'Solaris'}) RETURN f.title"
    assert passes_all(give(judge, writes.replace("(f:", "(x:").replace("f.title", "x.title"), reference=writes))
    assert give(judge, "MATCH (f:Film) DETACH DELETE f", reference=writes).checks["reads"] is False


def test_row_order_matters_if_the_reference_sorts(judge: CypherJudge) -> None:
    reference = "MATCH (f:Film) RETURN f.title, f.year ORDER BY f.year DESC LIMIT 3"
    answer = "MATCH (x:Film) RETURN x.title AS t, x.year AS y ORDER BY y DESC LIMIT 3"
    assert passes_all(give(judge, answer, reference))
    assert give(judge, reference.replace(" DESC", ""), reference).checks["result"] is False
    assert give(judge, reference.replace("ORDER BY f.year DESC ", ""), reference).checks["result"] is False
    assert give(judge, reference.replace("LIMIT 3", "LIMIT 4"), reference).checks["result"] is False


def test_names_are_not_judged_without_a_schema(judge: CypherJudge) -> None:
    checks = give(judge, "MATCH (x:Thing) RETURN x.name", schema="").checks
    assert (checks["names"], checks["directions"], checks["result"], checks["matches"]) == (None, None, None, False)


def test_without_an_engine_the_normal_form_decides(judge: CypherJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    without = CypherJudge(("graphglot",), with_engine=False)
    monkeypatch.setattr(without, "_syntax", judge._syntax)
    assert "not judged" in without.checks[4].checker
    answer = REFERENCE.lower().replace("actor", "Actor").replace("film", "Film").replace("played_in", "PLAYED_IN")
    assert passes_all(give(without, answer))
    assert give(without, REFERENCE.replace("f.year > 1990", "1990 < f.year")).checks == {
        "parses": True,
        "reads": True,
        "names": True,
        "directions": True,
        "result": None,
        "matches": False,
        "equal": False,
    }


def test_checkers_and_missing_backends_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("LAUNCHER_NODE_DIR", str(tmp_path))
    analyser = open_syntax_checker()
    assert analyser.checker.startswith("graphglot ")
    analyser.close()
    with pytest.raises(InputError, match="no Cypher parser") as raised:
        open_syntax_checker(("node", "racer"))
    assert "pip install 'expert-launcher[quality]'" in str(raised.value)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("MATCH (a:A) WHERE a.x = 1 OR a.y = 2 RETURN a", "match (b:A) where b.y=2 or b.x=1 return b;", True),
        (
            "MATCH (a:A) WHERE a.x = 1 AND a.y = 2 OR a.z RETURN a",
            "MATCH (a:A) WHERE a.y = 2 AND a.x = 1 OR a.z RETURN a",
            False,
        ),
        ("MATCH (a:A) RETURN a.x ORDER BY a.x ASC", "MATCH (a:A) RETURN a.x AS x ORDER BY x", True),
        ("MATCH (a:A)-[r:R]->(b) RETURN a.x", "MATCH ()<-[:R]-(a:A) RETURN a.`x`", True),
        ("MATCH (a:A)-[r:R]->(b) RETURN a.x", "MATCH (a:A)<-[:R]-() RETURN a.x", False),
        ("MATCH (a:A)-[:R]->(b:A) RETURN a.x", "MATCH (a:A)-[:R]->(b:A) RETURN b.x", False),
        ("MATCH (a:A) RETURN a.Name", "MATCH (a:A) RETURN a.name", False),
        ("MATCH (a:A {x: 1.50}) RETURN COUNT(a)", "MATCH (a:A {x: 1.5}) RETURN count(a)", True),
        ("MATCH (a:A) WHERE a.x IN ['b', 'a'] RETURN a", "MATCH (a:A) WHERE a.x IN ['a', \"b\"] RETURN a", True),
        ("MATCH (a:A) RETURN 'It''s'", "MATCH (a:A) RETURN 'its'", False),
    ],
)
def test_normal_form(first: str, second: str, same: bool) -> None:
    assert (normalize_query(split_tokens(first)) == normalize_query(split_tokens(second))) is same


BULLETS = """Node properties:
- **Film**
  - `title`: STRING Example: "Up"
  - `year`: INTEGER Min: 1, Max: 2
- **Actor**
  - `name`: STRING
Relationship properties:
- **PLAYED_IN**
  - `role: STRING` Example: "x"
The relationships:
(:Actor)-[:PLAYED_IN]->(:Film)"""
BRACES = """Node properties are the following:
Film {title: STRING, year: INTEGER},Actor {name: STRING}
Relationship properties are the following:
PLAYED_IN {role: STRING}
The relationships are the following:
(:Actor)-[:PLAYED_IN]->(:Film)"""
STARTS_AND_ENDS = """Relevant node labels and their properties (with datatypes) are:
Film {title: STRING, year: INTEGER}
Actor {name: STRING}

Relevant relationships are:
{'start': 'Actor', 'type': 'PLAYED_IN', 'end': 'Film' }

Relevant relationship properties (with datatypes) are:
PLAYED_IN {role: STRING}"""
OBJECTS = """Node properties are the following:
[{'properties': [{'property': 'title', 'type': 'STRING'}, {'property': 'year', 'type': 'INTEGER'}], 'labels': 'Film'},
 {'properties': [{'property': 'name', 'type': 'STRING'}], 'labels': 'Actor'}]
Relationship properties are the following:
[{'properties': [{'property': 'role', 'type': 'STRING'}], 'type': 'PLAYED_IN'}]
The relationships are the following:
['(:Actor)-[:PLAYED_IN]->(:Film)']"""


INLINE = """Film {title: STRING, year: INTEGER}
Actor {name: STRING}
(a:Actor)-[p:PLAYED_IN {role: STRING}]->(f:Film)"""


@pytest.mark.parametrize("text", [BULLETS, BRACES, STARTS_AND_ENDS, OBJECTS, INLINE])
def test_schemas_of_other_rows(text: str) -> None:
    schema = load_graph_schema(text)
    assert schema is not None
    assert schema.nodes == {"Film": {"title": "STRING", "year": "INTEGER"}, "Actor": {"name": "STRING"}}
    assert schema.relationships == {"PLAYED_IN": {"role": "STRING"}}
    assert schema.links == {("Actor", "PLAYED_IN", "Film")}


@pytest.mark.parametrize(
    ("reference", "answer", "is_right"),
    [
        ("MATCH (a:Actor) RETURN a.name", "OPTIONAL MATCH (a:Actor) RETURN a.name", False),
        ("MATCH (a:Actor) RETURN a.name", "MATCH (a) RETURN a.name", False),
        ("MATCH (a:Actor) RETURN a.name", "MATCH (a:Actor) WITH a LIMIT 300 RETURN a.name", False),
        (
            "MATCH (a:Actor) WHERE a.born > 1950 RETURN a.name",
            "OPTIONAL MATCH (a:Actor) WHERE a.born > 1950 RETURN a.name",
            False,
        ),
        (
            "MATCH (a:Actor) MATCH (f:Film) RETURN a.name, f.title",
            "MATCH (a:Actor) OPTIONAL MATCH (f:Film) RETURN a.name, f.title",
            False,
        ),
        ("MATCH (a:Actor) RETURN count(a)", "OPTIONAL MATCH (a:Actor) RETURN count(a)", True),
        ("OPTIONAL MATCH (a:Actor) RETURN a.name", "MATCH (a:Actor) RETURN a.name", False),
    ],
)
def test_optional_match_is_no_match(judge: CypherJudge, reference: str, answer: str, is_right: bool) -> None:
    assert give(judge, answer, reference).checks["matches"] is is_right


@pytest.mark.parametrize(
    ("reference", "answer", "is_right"),
    [
        # In Neo4j, no two relationships of one MATCH are the same; those of two MATCHes may be.
        (
            "MATCH (a:Actor)-[:PLAYED_IN]->(f:Film)<-[:PLAYED_IN]-(b:Actor) RETURN a.name, b.name",
            "MATCH (a:Actor)-[:PLAYED_IN]->(f:Film) MATCH (b:Actor)-[:PLAYED_IN]->(f) RETURN a.name, b.name",
            False,
        ),
        (
            "MATCH (a:Actor)-[:PLAYED_IN]->(f:Film)<-[:PLAYED_IN]-(b:Actor) WHERE f.year > 1990 OR b.born < 1950 "
            "RETURN a.name",
            "MATCH (b:Actor)-[r]->(f:Film), (a:Actor)-[:PLAYED_IN]->(f) "
            "WHERE b.born < 1950 OR f.year > 1990 RETURN a.name",
            True,
        ),
        (
            "MATCH (f:Film) WHERE f.year > 1990 AND f.year <= 2000 RETURN f.title",
            "MATCH (f:Film) WHERE 1990 < f.year <= 2000 RETURN f.title",
            True,
        ),
        (
            "MATCH (f:Film) WHERE f.year > 1990 AND f.year <= 2000 RETURN f.title",
            "MATCH (f:Film) WHERE 1990 <= f.year <= 2000 RETURN f.title",
            False,
        ),
        # Texts that differ by case or white space only.
        (
            "MATCH (a:Actor) RETURN a.name ORDER BY a.name",
            "MATCH (a:Actor) RETURN a.name ORDER BY toLower(a.name)",
            False,
        ),
        ("MATCH (a:Actor) RETURN DISTINCT a.name", "MATCH (a:Actor) RETURN DISTINCT toUpper(a.name)", False),
        (
            "MATCH (f:Film {title: 'War'}) RETURN f.year",
            "MATCH (f:Film) WHERE trim(f.title) = 'War' RETURN f.year",
            False,
        ),
        ("MATCH (a:Actor) RETURN size(a.name)", "MATCH (a:Actor) RETURN size(trim(a.name))", False),
    ],
)
def test_edges_chains_and_look_alikes(judge: CypherJudge, reference: str, answer: str, is_right: bool) -> None:
    verdict = give(judge, answer, reference)
    assert verdict.checks["matches"] is is_right, verdict.reason


SORTED = "MATCH (a:Actor) RETURN a.name ORDER BY a.born DESC LIMIT 3"


@pytest.mark.parametrize(
    ("reference", "answer", "is_right"),
    [
        (SORTED, "MATCH (a:Actor) WITH a ORDER BY a.born DESC LIMIT 3 RETURN a.name", True),
        (SORTED, "MATCH (a:Actor) WITH a.name AS n, a.born AS b ORDER BY b DESC LIMIT 3 RETURN n", True),
        (SORTED, "MATCH (a:Actor) WITH a ORDER BY a.born LIMIT 3 RETURN a.name", False),
        (SORTED, "MATCH (a:Actor) WITH a ORDER BY a.born DESC LIMIT 4 RETURN a.name", False),
        (SORTED, "MATCH (a:Actor) WITH a ORDER BY a.born DESC LIMIT 3 RETURN count(a)", False),
        (SORTED, "MATCH (a:Actor) WITH a ORDER BY a.born DESC LIMIT 3 RETURN DISTINCT a.name", False),
        (SORTED, "MATCH (a:Actor) WITH a ORDER BY a.born DESC LIMIT 3 WHERE a.born > 9 RETURN a.name", False),
        ("MATCH (a:Actor) RETURN a.name", "MATCH (a:Actor) RETURN a.name SKIP 0", True),
        ("MATCH (a:Actor) RETURN a.name", "MATCH (a:Actor) RETURN a.name SKIP 1", False),
        ("MATCH (a:Actor) RETURN a.name", "MATCH (a) WHERE a:Actor RETURN a.name", True),
        ("MATCH (a:Actor) RETURN a.name", "MATCH (a) WHERE NOT a:Actor RETURN a.name", False),
        (
            "MATCH (a:Actor) WHERE a.born > 1950 OR a.born < 1920 RETURN a.name",
            "MATCH (a:Actor) WHERE (NOT (a.born <= 1950)) OR (1920 > a.born) RETURN a.name",
            True,
        ),
        ("MATCH (a:Actor) RETURN a.name", "MATCH (a) WHERE (a:Actor OR a:Actor) RETURN a.name", True),
    ],
)
def test_limits_and_labels_may_be_written_in_another_clause(
    judge: CypherJudge, reference: str, answer: str, is_right: bool
) -> None:
    verdict = give(judge, answer, reference)
    assert verdict.checks["matches"] is is_right, verdict.reason


@pytest.mark.parametrize("answer", ["MATCH (a:Actor RETURN\na.name", "MATCH (a:\x1b[31mActor) RETURN a", "RETURN '\n"])
def test_reasons_are_one_printable_line(judge: CypherJudge, answer: str) -> None:
    reason = give(judge, answer).reason
    assert reason.isprintable(), reason
