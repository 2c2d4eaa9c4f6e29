"""Judge of SQL by execution match: an answer is correct if it returns what the reference query returns.

Both run on databases generated for the reference. An answer is one statement of SQLite's dialect, with or without a
code fence. Column names do not matter, their number and order do; rows are compared as a multiset, in any order unless
the reference sorts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version

from launcher.core.errors import InputError, escape
from launcher.core.worker import WorkerError
from launcher.judges.base import (
    MAX_ANSWER_CHARACTERS,
    Check,
    CloseOnExit,
    ReferenceRow,
    Verdict,
    has_invalid_characters,
    keep_applicable,
)
from launcher.judges.worker import make_module_worker

ANSWER_SECONDS = 5.0  # an answer needs about a hundredth of a second
_MEMORY_MIB = 768  # Python, sqlglot and SQLite need about 150 MiB
_MAX_REASON = 240


class SqlJudge(CloseOnExit):
    """Judge that runs all untrusted SQL in one worker process."""

    main_check = "result"

    def __init__(self) -> None:
        self.checks = _make_checks()
        self._worker = make_module_worker("launcher.judges.sql.worker", seconds=ANSWER_SECONDS, memory_mib=_MEMORY_MIB)

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        return [self._judge_one(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def close(self) -> None:
        """Kill the worker, if there is one."""
        self._worker.close()

    def _judge_one(self, row: ReferenceRow, answer: str) -> Verdict:
        if any(map(has_invalid_characters, (row.context, row.reference))):
            return make_verdict("not judged: the row contains NUL or lone surrogates")
        problem = _find_text_problem(answer)
        # The row alone decides which checks apply, so the worker sees it even if the answer is rejected.
        verdict = self._judge_text(row, "" if problem else answer)
        is_wrong = problem and verdict.checks["parses"] is False
        reason = escape(f"it does not parse: {problem}" if is_wrong else verdict.reason)
        shortened = reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 3] + "..."
        return Verdict(checks=verdict.checks, reason=shortened)

    def _judge_text(self, row: ReferenceRow, answer: str) -> Verdict:
        """Return a verdict even if the answer kills the worker or makes it hang: such an answer is wrong."""
        try:
            return self._request(row, answer)
        except WorkerError as error:
            reason = f"it cannot be judged: the worker {error}"
        try:
            applicable = {name for name, passed in self._request(row, "").checks.items() if passed is not None}
        except WorkerError as error:
            return make_verdict(f"not judged: the worker {error} on the row's tables and reference")
        try:
            parses = self._request(row, answer, only_parse=True).checks["parses"]
        except WorkerError:
            parses = False
        return keep_applicable(make_verdict(reason, parses=parses, executes=False, result=False), applicable)

    def _request(self, row: ReferenceRow, answer: str, *, only_parse: bool = False) -> Verdict:
        request = {"context": row.context, "reference": row.reference, "answer": answer, "only_parse": only_parse}
        return Verdict(**json.loads(self._worker.request(json.dumps(request), retry=False)))


def make_verdict(
    reason: str, *, parses: bool | None = None, executes: bool | None = None, result: bool | None = None
) -> Verdict:
    """Return a verdict; None means not judged."""
    return Verdict(checks={"parses": parses, "executes": executes, "result": result}, reason=reason)


def _find_text_problem(answer: str) -> str:
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"it is longer than {MAX_ANSWER_CHARACTERS:,} characters"
    if not answer.strip():
        return "it is empty"
    if has_invalid_characters(answer):
        return "it contains NUL or lone surrogates"
    return ""


def _make_checks() -> tuple[Check, ...]:
    try:
        import apsw
        import sqlglot  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"judging SQL needs the package {error.name}", hint="pip install 'expert-launcher[quality]'"
        ) from None
    parser, engine = f"sqlglot {version('sqlglot')}", f"SQLite {apsw.sqlite_lib_version()} (apsw)"
    return (
        Check(name="parses", title="parses as SQL", checker=f"{parser}, else {engine}"),
        Check(name="executes", title="runs on the question's tables", checker=engine),
        Check(name="result", title="gives what the reference gives", checker=f"{engine}, on generated rows"),
    )
