"""What is said of one answer: does it parse, does it run on the row's tables, does it give what the reference gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.quality.fences import unfence
from launcher.quality.sql_database import CannotRunError, Database
from launcher.quality.sql_gathering import gather_facts
from launcher.quality.sql_question import Question, Scene
from launcher.quality.sql_reading import (
    NotReadableError,
    describe,
    find_rowid,
    is_query,
    is_same_writing,
    read_statements,
    split_statements,
)
from launcher.values import Frozen

if TYPE_CHECKING:
    from sqlglot import exp

_UNKNOWN_NAME = re.compile(r"no such (?:column|table)|ambiguous column")


class Ruling(Frozen):
    """Crosses the pipe from the process that judges."""

    parses: bool | None = None
    executes: bool | None = None
    result: bool | None = None
    reason: str = ""


def fail(reason: str, *, parses: bool = False, executes: bool = False) -> Ruling:
    """A check that rests on one that failed has failed, too."""
    return Ruling(parses=parses, executes=executes, result=False, reason=reason)


class Answer:
    """An answer as far as it could be read; raises NotReadableError where neither sqlglot nor SQLite can."""

    def __init__(self, text: str, question: Question) -> None:
        self.sql = unfence(text)
        self.statements: list[exp.Expr] | None
        try:
            self.statements = read_statements(self.sql, question.names)
        except NotReadableError:
            if not _is_read_by_sqlite(self.sql):
                raise
            self.statements = None  # SQLite knows its own grammar best
        if self.statements is not None and not self.statements:
            raise NotReadableError("it holds no statement")
        if self.statements is not None and len(self.statements) == 1 and ";" in self.sql.rstrip(";"):
            self.sql = split_statements(self.sql)[0]  # SQLite takes a comment behind a semicolon for a statement


def _is_read_by_sqlite(sql: str) -> bool:
    database = Database("")
    database.close_to_writing()
    try:
        database.run(sql, 0)
    except CannotRunError as error:
        return str(error).startswith("no such")  # names are looked up once the grammar is satisfied
    finally:
        database.close()
    return True


def within_reach(question: Question, ruling: Ruling) -> Ruling:
    """Whether a row can be judged does not depend on the answer: else only wrong ones would count."""
    if question.why_not_run or not question.reference_is_query:
        return ruling.model_copy(update={"executes": None, "result": None})
    return ruling.model_copy(update={"result": None}) if question.why_not_compared else ruling


def rule(question: Question, answer: Answer) -> Ruling:
    """The answer parses; the rest of the checks."""
    refused = _refuse(question, answer)
    if refused:
        return fail(refused, parses=True)
    if question.why_not_run or not question.reference_is_query:
        return Ruling(parses=True, reason=f"not judged: {question.why_not_run or question.why_not_compared}")
    if question.why_not_compared:
        return _rule_without_reference(question, answer)
    try:
        found = _compare(question, answer)
    except CannotRunError as error:
        return fail(f"it does not run: {error}", parses=True)
    if found is False:
        return fail("its result differs from the reference's", parses=True, executes=True)
    if found is None:
        reason = "not judged: the reference gives the same on all databases, or leaves open what it gives"
        return Ruling(parses=True, executes=True, reason=reason)
    return Ruling(parses=True, executes=True, result=True)


def _compare(question: Question, answer: Answer) -> bool | None:
    """On one database after the other, until it differs; None where no database can tell. What is written as the
    reference is needs no more than one that can."""
    alive = list(range(len(question.accepted)))
    first = answer.statements[0] if answer.statements else None
    verbatim = [index for index in alive if is_same_writing(first, question.accepted[index].statement)]
    seen: list[Scene] = []
    for scene in question.iterate_scenes():
        seen.append(scene)
        alive = _keep_equal(question, answer, scene, alive)
        if not alive:
            return False
        if any(index in alive and _is_telling(seen, index) for index in verbatim):
            return True
    if first is not None and not verbatim:
        for scene in question.make_pointed_scenes(gather_facts(first, question.schema)):
            alive = _keep_equal(question, answer, scene, alive)
            scene.database.close()
            if not alive:
                return False
    return True if any(_is_telling(seen, index) for index in alive) else None


def _is_telling(scenes: Sequence[Scene], index: int) -> bool:
    """A reference that gives the same on every database is met by too many answers."""
    settled = [expected for scene in scenes if (expected := scene.expected[index]) is not None]
    return any(expected != settled[0] for expected in settled[1:])


def _keep_equal(question: Question, answer: Answer, scene: Scene, alive: list[int]) -> list[int]:
    """Which accepted answers give the same as this one."""
    cap = max((expected.num_rows for expected in scene.expected if expected is not None), default=0)
    runs = [scene.database.run(answer.sql, cap)]
    if any(question.accepted[index].has_order for index in alive):
        with scene.database.reversed_scans():  # an order that nobody asked SQLite for is luck
            runs.append(scene.database.run(answer.sql, cap))
    return [
        index
        for index in alive
        if (expected := scene.expected[index]) is None
        or all(run.complete and expected.accepts(run.rows, run.num_columns) for run in runs)
    ]


def _refuse(question: Question, answer: Answer) -> str:
    """What needs no database to be wrong."""
    if answer.statements is None:
        return ""
    wanted = question.num_references if question.why_not_run else 1
    if len(answer.statements) > max(wanted, 1):
        return f"it holds {len(answer.statements)} statements, where one is asked for"
    if question.reference_is_query:
        for statement in answer.statements:
            if not is_query(statement):
                return f"only a query may be run, and this is {describe(statement)}"
            rowid = (
                ""
                if question.why_not_run or question.reads_rowid
                else find_rowid(statement, answer.sql, question.names)
            )
            if rowid:
                return f"it does not run: no such column: {rowid}, as far as the row's tables tell"
    return ""


def _rule_without_reference(question: Question, answer: Answer) -> Ruling:
    """A reference that does not run may be of a dialect that SQLite lacks; a name that no table has is wrong in any."""
    reason = f"not judged: {question.why_not_compared}"
    try:
        for scene in question.iterate_scenes():
            scene.database.run(answer.sql, 0)
    except CannotRunError as error:
        broken = bool(_UNKNOWN_NAME.search(question.why_not_compared))
        foreign = question.why_not_compared.startswith(("the reference does not run", "the reference cannot be read"))
        if (foreign and broken) or (foreign and not _UNKNOWN_NAME.search(str(error))):
            return Ruling(parses=True, reason=reason)
        return fail(f"it does not run: {error}", parses=True)
    return Ruling(parses=True, executes=True if question.scenes else None, reason=reason)
