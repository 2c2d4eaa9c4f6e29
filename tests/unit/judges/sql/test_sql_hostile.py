"""Hostile SQL answers fail quickly, in little memory and without side effects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.judges.base import ReferenceRow, Verdict
from launcher.judges.sql.judge import ANSWER_SECONDS, SqlJudge
from tests.unit.judges.verdicts import passes_all

pytestmark = pytest.mark.process

TABLES = (
    "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT NOT NULL, x REAL);\n"
    "CREATE TABLE u (id INTEGER PRIMARY KEY, t_id INTEGER REFERENCES t(id));"
)
GOLD = "SELECT name FROM t WHERE x > 5"
QUESTION = ReferenceRow(instruction="", context=TABLES, reference=GOLD)
PEAK_BYTES = 300 * 2**20
SECONDS = 4 * ANSWER_SECONDS + 60  # mostly far less: three seconds of work at most
SHORT_SECONDS = 2.0  # for what takes all the time that it gets

WITHOUT_END = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"
HOSTILE = {
    "drop": "DROP TABLE t",
    "delete": "DELETE FROM t",
    "delete after WITH": "WITH a AS (SELECT 1) DELETE FROM t",
    "insert that returns": "INSERT INTO t VALUES (1, 'a', 2) RETURNING name",
    "update": "UPDATE t SET x = 1",
    "create": "CREATE TABLE v AS SELECT name FROM t",
    "virtual table": "CREATE VIRTUAL TABLE f USING fts5(a)",
    "attach": "ATTACH '{outside}' AS o",
    "vacuum": "VACUUM INTO '{outside}'",
    "write a file": "SELECT writefile('{outside}', 'x')",
    "read a file": "SELECT readfile('/etc/passwd')",
    "pragma": "PRAGMA writable_schema = 1",
    "pragma as a table": "SELECT name FROM pragma_table_info('t')",
    "the catalogue": "SELECT sql FROM sqlite_master",
    "extension": "SELECT load_extension('x')",
    "explain": f"EXPLAIN {GOLD}",
    "transaction": "BEGIN",
    "several": f"{GOLD}; DROP TABLE t",
    "several queries": f"{GOLD}; {GOLD}",
    "rows without end": f"{WITHOUT_END} SELECT n FROM r",
    "counting without end": f"{WITHOUT_END} SELECT COUNT(*) FROM r",
    "cross join": "SELECT COUNT(*) FROM " + ", ".join(f"t AS t{number}" for number in range(12)),
    "zeroblob": "SELECT zeroblob(1000000000)",
    "randomblob": "SELECT randomblob(900000000)",
    "many blobs": "SELECT hex(randomblob(400000)) FROM t, u",
    "printf": "SELECT printf('%.1000000000c', 'x')",
    "replace": "SELECT replace(replace(hex(zeroblob(300000)), '0', '00000000'), '0', '00000000')",
    "group_concat": "SELECT group_concat(a.name || hex(zeroblob(3000))) FROM t a, t b, t c",
    "one slow step": "SELECT instr(hex(zeroblob(499000)), substr(hex(zeroblob(499000)), 1, 400000) || '1')",
    "10 MB": "SELECT '" + "a" * 10_000_000 + "'",
    "long list": "SELECT " + ",".join("1" for _ in range(45_000)),
    "wide": "SELECT " + ", ".join(["t.*"] * 400) + " FROM t",
    "brackets": "SELECT " + "(" * 40_000 + "1" + ")" * 40_000,
    "open brackets": "SELECT " + "(" * 90_000,
    "square brackets": "SELECT " + "[" * 90_000,
    "calls": "SELECT " + "abs(" * 5_000 + "1" + ")" * 5_000,
    "negations": "SELECT " + "NOT " * 20_000 + "1",
    "cases": "SELECT " + "CASE WHEN 1 THEN " * 3_000 + "1" + " END" * 3_000,
    "subqueries": "SELECT * FROM " + "(SELECT * FROM " * 3_000 + "t" + ")" * 3_000,
    "conditions": "SELECT name FROM t WHERE " + " AND ".join(["x > 5"] * 9_000),
    "unions": " UNION ALL ".join([GOLD] * 2_000),
    "quotes": "SELECT " + "'" * 90_000,
    "comments": "/*" * 40_000,
    "only a comment": "-- nothing",
    "only semicolons": ";;;",
    "empty": "",
    "blank": " \n\t",
    "lone surrogate": f"{GOLD} AND name <> '\ud800'",
    "NUL": f"{GOLD}\0; DROP TABLE t",
    "escape sequence": "SELECT \x1b[31m FROM t",
    "text that is no UTF-8": "SELECT CAST(x'ff' AS TEXT) FROM t",
    "overflow": "SELECT SUM(9223372036854775807) FROM (SELECT 1 UNION ALL SELECT 2)",
    "huge number": f"SELECT name FROM t WHERE x > {'9' * 400}",
    "prose": f"Of course! Here is the query:\n\n```sql\n{GOLD}\n```\n",
}
SLOWEST = "one slow step"  # SQLite cannot be interrupted in it: the worker is killed after its time limit


@pytest.fixture(scope="module")
def judge() -> Iterator[SqlJudge]:
    with SqlJudge() as judge:
        yield judge


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != SLOWEST])
def test_a_hostile_answer_is_wrong_and_harmless(judge: SqlJudge, tmp_path: Path, name: str) -> None:
    judge_hostile_answer(judge, tmp_path, name)


def judge_hostile_answer(judge: SqlJudge, tmp_path: Path, name: str) -> Verdict:
    """Check what holds for every hostile answer, and return the verdict."""
    assert passes_all(judge.judge([QUESTION], [GOLD])[0])
    outside = tmp_path / "outside"
    begun = time.monotonic()
    verdict = judge.judge([QUESTION], [HOSTILE[name].replace("{outside}", str(outside))])[0]
    assert time.monotonic() - begun < SECONDS
    assert verdict.checks["result"] is False
    assert not passes_all(verdict)
    assert verdict.reason.isprintable()
    assert verdict.reason
    assert len(verdict.reason) <= 240
    assert list(tmp_path.iterdir()) == []
    assert _peak_bytes(judge) < PEAK_BYTES
    after = judge.judge([QUESTION], [GOLD])[0]
    assert list(after.checks.values()) == [True, True, True]
    return verdict


@pytest.mark.parametrize("name", ["pragma as a table", "the catalogue", "extension", "rows without end", "explain"])
def test_forbidden_statements_are_not_run(judge: SqlJudge, name: str) -> None:
    assert dict(judge.judge([QUESTION], [HOSTILE[name]])[0].checks) == {
        "parses": True,
        "executes": False,
        "result": False,
    }


def _peak_bytes(judge: SqlJudge) -> int:
    """Of the process that judges; 0 where the answer has killed it, which the limit of its address space bounds."""
    process = judge._worker._worker
    if process is None:
        return 0
    status = Path(f"/proc/{process.pid}/status").read_text()
    (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak) * 1024


def test_worker_is_killed_only_if_the_query_cannot_be_interrupted(
    judge: SqlJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge.judge([QUESTION], [GOLD])
    before = judge._worker._worker
    judge.judge([QUESTION], [HOSTILE["rows without end"]])
    judge.judge([QUESTION], [HOSTILE["brackets"]])
    assert judge._worker._worker is before
    assert judge._worker.seconds == ANSWER_SECONDS
    monkeypatch.setattr(judge._worker, "seconds", SHORT_SECONDS)
    verdict = judge_hostile_answer(judge, tmp_path, SLOWEST)
    assert judge._worker._worker is not before
    assert dict(verdict.checks) == {"parses": True, "executes": False, "result": False}
    assert verdict.reason == f"it cannot be judged: the worker timed out after {SHORT_SECONDS:g} s"


def test_hostile_reference_is_not_judged(judge: SqlJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in ((SLOWEST, 0.5), ("counting without end", ANSWER_SECONDS)):
        monkeypatch.setattr(judge._worker, "seconds", seconds)
        verdict = judge.judge([ReferenceRow(instruction="", context=TABLES, reference=HOSTILE[name])], [GOLD])[0]
        assert verdict.checks["result"] is None
        assert verdict.reason.startswith("not judged: the ")
    assert passes_all(judge.judge([QUESTION], [GOLD])[0])


def test_worker_has_resource_limits(judge: SqlJudge) -> None:
    judge.judge([QUESTION], [GOLD])
    process = judge._worker._worker
    assert process is not None
    lines = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    assert int(limits["Max data size"][0]) <= 2**30
    assert limits["Max file size"] == ["0", "0"]
    assert limits["Max core file size"] == ["0", "0"]
    assert int(limits["Max cpu time"][0]) <= 3600
    assert int(limits["Max open files"][0]) <= 512


def test_worker_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-hunter2")
    with SqlJudge() as judge:
        assert passes_all(judge.judge([QUESTION], [GOLD])[0])
        process = judge._worker._worker
        assert process is not None
        assert b"hunter2" not in Path(f"/proc/{process.pid}/environ").read_bytes()


def test_close_kills_the_worker() -> None:
    judge = SqlJudge()
    judge.judge([QUESTION], [GOLD])
    process = judge._worker._worker
    assert process is not None
    judge.close()
    judge.close()
    assert not process.is_alive()
    assert not Path(f"/proc/{process.pid}").exists()
