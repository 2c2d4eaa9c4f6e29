"""Worker process of the SQL judge: reads requests from stdin and writes verdicts to stdout.

`SqlJudge` starts it, and may kill it at any time.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

import apsw
from sqlglot import exp

from launcher.judges.base import Verdict, keep_applicable, strip_code_fence
from launcher.judges.sql.database import CannotRunError, Database
from launcher.judges.sql.fixtures import QueryFixture, TestDatabase
from launcher.judges.sql.judge import make_verdict
from launcher.judges.sql.parse import (
    DIALECT,
    SqlParseError,
    find_rowid,
    is_same_query,
    parse_statements,
    split_statements,
)
from launcher.judges.sql.query_analysis import analyze_query
from launcher.judges.sql.row_builder import MAX_COUNT


class ParsedAnswer:
    """A parsed answer; raises SqlParseError if neither sqlglot nor SQLite can parse it."""

    def __init__(self, text: str, fixture: QueryFixture) -> None:
        self.sql = strip_code_fence(text)
        self.statements: list[exp.Expr] | None
        try:
            self.statements = parse_statements(self.sql, fixture.names)
        except SqlParseError:
            if not _is_parsed_by_sqlite(self.sql):
                raise
            self.statements = None  # SQLite accepts it
        if self.statements is not None and not self.statements:
            raise SqlParseError("it contains no statement")
        if self.statements is not None and len(self.statements) == 1 and ";" in self.sql.rstrip(";"):
            self.sql = split_statements(self.sql)[0]  # SQLite takes a comment after a semicolon for a statement


def _is_parsed_by_sqlite(sql: str) -> bool:
    database = Database("")
    database.make_read_only()
    try:
        database.run(sql, 0)
    except CannotRunError as error:
        return str(error).startswith("no such")  # names are resolved after parsing
    finally:
        database.close()
    return True


def find_applicable(fixture: QueryFixture) -> set[str]:
    """Return the names of the checks that apply to a row, whatever the answer is.

    If they depended on the answer, a check could apply to wrong answers only.
    """
    parses = fixture.reference_is_readable  # otherwise it is probably in another dialect than SQLite's
    executes = not _why_not_run(fixture) and next(fixture.iterate_databases(), None) is not None
    result = executes and not fixture.why_not_compared and _can_compare(fixture)
    applies = {"parses": parses, "executes": executes, "result": result}
    return {name for name, can_judge in applies.items() if can_judge}


def _why_not_run(fixture: QueryFixture) -> str:
    """Return why answers are not run, for example because the reference does not run either; empty if they are."""
    return fixture.why_not_run or ("" if fixture.is_volatile else fixture.why_not_compared)


def _can_compare(fixture: QueryFixture) -> bool:
    """Whether the reference returns different results on different databases."""
    used: list[TestDatabase] = []
    for database in fixture.iterate_databases():
        used.append(database)
        if any(_is_distinguishing(used, index) for index in range(len(fixture.accepted))):
            return True
    return False


def judge_answer(fixture: QueryFixture, answer: ParsedAnswer) -> Verdict:
    """Return the verdict on an answer that parses."""
    if refusal := _refuse(fixture, answer):
        return make_verdict(refusal, parses=True, executes=False, result=False)
    if reason := _why_not_run(fixture):
        return make_verdict(f"not judged: {reason}", parses=True)
    try:
        if fixture.why_not_compared:
            for database in fixture.iterate_databases():
                database.sqlite.run(answer.sql, 0)
            return make_verdict(f"not judged: {fixture.why_not_compared}", parses=True, executes=True)
        if not _can_compare(fixture):
            reason = "the reference returns the same on all test databases, or its result is not deterministic"
            _compare(fixture, answer)  # it must run
            return make_verdict(f"not judged: {reason}", parses=True, executes=True)
        is_equal = _compare(fixture, answer)
    except CannotRunError as error:
        return make_verdict(f"it does not run: {error}", parses=True, executes=False, result=False)
    reason = "" if is_equal else "its result differs from the reference's"
    return make_verdict(reason, parses=True, executes=True, result=is_equal)


def _compare(fixture: QueryFixture, answer: ParsedAnswer) -> bool:
    """Return whether an answer matches the reference on all test databases; stops at the first difference.

    For an answer written like the reference, two databases with different results of the reference are enough.
    """
    candidates = list(range(len(fixture.accepted)))
    first = answer.statements[0] if answer.statements else None
    verbatim = [index for index in candidates if is_same_query(first, fixture.accepted[index].statement)]
    used: list[TestDatabase] = []
    for database in fixture.iterate_databases():
        used.append(database)
        candidates = _keep_equal(fixture, answer.sql, database, candidates)
        if not candidates:
            return False
        if any(index in candidates and _is_distinguishing(used, index) for index in verbatim):
            return True
    if first is not None and not verbatim:
        for database in fixture.make_targeted_databases(analyze_query(first, fixture.schema)):
            candidates = _keep_equal(fixture, answer.sql, database, candidates)
            database.sqlite.close()
            if not candidates:
                return False
        candidates = _keep_unbounded(fixture, first, candidates)
        if not candidates:
            return False
    return any(index in verbatim or _is_distinguishing(used, index) for index in candidates)


def _keep_unbounded(fixture: QueryFixture, statement: exp.Expr, candidates: list[int]) -> list[int]:
    """Return the candidates that still match on tables with more rows than the LIMIT or COUNT that an answer adds.

    A number above MAX_COUNT is lowered to it first, which does not change results that have fewer rows.
    """
    lowered = statement.copy()
    bounds = fixture.find_added_bounds(lowered)
    if not bounds:
        return candidates
    for bound in bounds:
        bound.set("this", str(min(int(bound.this), MAX_COUNT)))
    facts = analyze_query(lowered, fixture.schema)
    database = fixture.make_long_database(facts, max(int(bound.this) for bound in bounds))
    if database is None:
        return candidates
    try:
        return _keep_equal(fixture, lowered.sql(dialect=DIALECT), database, candidates)
    finally:
        database.sqlite.close()


def _is_distinguishing(databases: Sequence[TestDatabase], index: int) -> bool:
    """Return whether the reference returns different results on some databases; a constant is too easy to match."""
    settled = [expected for database in databases if (expected := database.expected[index]) is not None]
    return any(expected != settled[0] for expected in settled[1:])


def _keep_equal(fixture: QueryFixture, sql: str, database: TestDatabase, candidates: list[int]) -> list[int]:
    """Return the indices of the accepted queries that return the same rows as the answer."""
    cap = max((expected.num_rows for expected in database.expected if expected is not None), default=0)
    runs = [database.sqlite.run(sql, cap)]
    if any(fixture.accepted[index].has_order for index in candidates):
        with database.sqlite.reversed_scans():  # an order without ORDER BY is accidental
            runs.append(database.sqlite.run(sql, cap))
    return [
        index
        for index in candidates
        if (expected := database.expected[index]) is None
        or all(run.complete and expected.accepts(run.rows, run.num_columns) for run in runs)
    ]


def _refuse(fixture: QueryFixture, answer: ParsedAnswer) -> str:
    """Return why an answer is wrong without running it; empty if it has to run."""
    if answer.statements is None:
        return ""
    max_statements = fixture.num_references if fixture.why_not_run else 1
    if len(answer.statements) > max(max_statements, 1):
        return f"it contains {len(answer.statements)} statements instead of one"
    if fixture.reference_is_query:
        for statement in answer.statements:
            if not isinstance(statement, exp.Query):
                return f"it is not a query but {statement.key.upper()}"
            rowid = (
                "" if fixture.why_not_run or fixture.reads_rowid else find_rowid(statement, answer.sql, fixture.names)
            )
            if rowid:
                return f"it does not run: no such column: {rowid}"
    return ""


_SQLITE_BYTES = 128 * 2**20
_RECURSION = 4_000  # sqlglot makes about 20 nested calls per pair of parentheses
_CACHED_FIXTURES = 4


def serve() -> None:
    """Judge one request per line of stdin."""
    logging.disable()
    gc.freeze()  # scanning the objects of imported packages takes a tenth of the time
    gc.set_threshold(20_000)
    sys.setrecursionlimit(_RECURSION)
    apsw.hard_heap_limit(_SQLITE_BYTES)
    fixtures: OrderedDict[tuple[str, str], QueryFixture] = OrderedDict()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            fixture = _get_fixture(request["context"], request["reference"], fixtures)
        except Exception as error:  # an unforeseen row costs its own verdict, not the evaluation
            reason = f"not judged: the row's tables or reference fail ({type(error).__name__}: {error})"
            verdict = make_verdict(reason)
        else:
            verdict = _judge(fixture, request["answer"], only_parse=request["only_parse"])
            verdict = keep_applicable(verdict, find_applicable(fixture))
        print(json.dumps(asdict(verdict)), flush=True)


def _judge(fixture: QueryFixture, text: str, *, only_parse: bool) -> Verdict:
    try:
        answer = ParsedAnswer(text, fixture)
    except SqlParseError as error:
        if not fixture.reference_is_readable:
            return make_verdict(f"not judged: neither it nor the reference can be parsed: {error}")
        return make_verdict(f"it does not parse: {error}", parses=False, executes=False, result=False)
    except Exception as error:
        reason = f"it does not parse: {type(error).__name__}: {error}"
        return make_verdict(reason, parses=False, executes=False, result=False)
    if only_parse:
        return make_verdict("", parses=True)
    try:
        return judge_answer(fixture, answer)
    except Exception as error:
        reason = f"it cannot be judged: {type(error).__name__}: {error}"
        return make_verdict(reason, parses=True, executes=False, result=False)


def _get_fixture(context: str, reference: str, fixtures: OrderedDict[tuple[str, str], QueryFixture]) -> QueryFixture:
    key = (context, reference)
    if key in fixtures:
        fixtures.move_to_end(key)
        return fixtures[key]
    if len(fixtures) >= _CACHED_FIXTURES:
        fixtures.popitem(last=False)[1].close()
    fixtures[key] = QueryFixture(context, reference)
    return fixtures[key]
