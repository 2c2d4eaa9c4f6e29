"""Measured accuracy of the SQL judge on reference queries: unchanged, rewritten, mutated and misnamed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from launcher.judges.base import ReferenceRow
from launcher.judges.sql.judge import SqlJudge
from launcher.judges.sql.parse import split_statements
from tests.conftest import SHARED
from tests.unit.judges.sql.sql_mutants import load_rows, make_hallucinations, make_mutants, make_rewrites

pytestmark = pytest.mark.process

FOREIGN = SHARED / "data" / "text2sql_questions.jsonl"
MUTANTS_REJECTED = 0.99  # mutants with the same meaning count as missed; 0.90 is required
A_FEW = 97  # every 97th of 2,400
ALL = pytest.param(1, marks=pytest.mark.slow, id="all")
FEW = pytest.param(A_FEW, id="a few")


@pytest.fixture(scope="module")
def judge() -> Iterator[SqlJudge]:
    with SqlJudge() as judge:
        yield judge


@pytest.mark.parametrize("every", [pytest.param(8, id="a few"), ALL])
def test_every_gold_passes_every_check(judge: SqlJudge, every: int) -> None:
    rows = load_rows(every)
    verdicts = judge.judge(rows, [row.reference for row in rows])
    assert len(verdicts) >= 300
    failed = [
        (row.reference, verdict)
        for row, verdict in zip(rows, verdicts, strict=True)
        if list(verdict.checks.values()) != [True, True, True]
    ]
    assert failed == []


@pytest.mark.parametrize("every", [FEW, ALL])
def test_no_rewritten_gold_is_rejected(judge: SqlJudge, every: int) -> None:
    kinds, rejected = Counter[str](), []
    for row in load_rows(every):
        for kind, sql in make_rewrites(row):
            verdict = judge.judge([row], [sql])[0]
            kinds[kind] += 1
            if verdict.checks["result"] is not True:
                rejected.append((kind, sql, verdict.reason))
    assert len(kinds) == 12
    assert rejected == []


@pytest.mark.parametrize("every", [FEW, ALL])
def test_mutants_are_rejected(judge: SqlJudge, every: int) -> None:
    made, rejected, missed = Counter[str](), Counter[str](), []
    for row in load_rows(every):
        for kind, sql in make_mutants(row):
            verdict = judge.judge([row], [sql])[0]
            made[kind] += 1
            assert verdict.checks["parses"], sql  # parsing alone rejects none of them
            if verdict.checks["result"] is False:
                rejected[kind] += 1
            else:
                missed.append((kind, row.reference, sql))
    assert len(made) == 13
    assert made.total() >= 250
    assert rejected.total() / made.total() >= MUTANTS_REJECTED, missed
    assert min(rejected[kind] / made[kind] for kind in made) >= 0.9, missed


@pytest.mark.parametrize("every", [FEW, ALL])
def test_every_invented_name_is_rejected(judge: SqlJudge, every: int) -> None:
    accepted, count = [], 0
    for row in load_rows(every):
        for _, sql in make_hallucinations(row):
            count += 1
            verdict = judge.judge([row], [sql])[0]
            if verdict.checks["executes"] is not False:
                accepted.append(sql)
    assert count >= 600
    assert accepted == []


def test_foreign_golds_parse(judge: SqlJudge) -> None:
    if not FOREIGN.is_file():
        pytest.skip("the shared data are not available")
    count = 0
    for line in FOREIGN.read_text().splitlines():
        sql = json.loads(line)["sql"]
        row = ReferenceRow(instruction="", context="", reference=sql)
        for answer in (sql, *split_statements(sql)):
            count += 1
            assert dict(judge.judge([row], [answer])[0].checks) == {
                "parses": True,
                "executes": None,
                "result": None,
            }, answer
    assert count >= 400
