"""Judge of SQL by execution match: an answer is correct if it returns what the reference query returns.

Both run on databases generated for the reference. An answer is one statement of SQLite's dialect, with or without a
code fence. Column names do not matter, their number and order do; rows are compared as a multiset, in any order unless
the reference sorts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from launcher.core.errors import InputError, LauncherError, escape
from launcher.core.frozen_model import Frozen
from launcher.core.worker import Worker, WorkerError, WorkerFailure
from launcher.judges.base import MAX_ANSWER_CHARACTERS, Check, CloseOnExit, ReferenceRow, Verdict
from launcher.judges.sandbox import make_sandboxed_command

CPU_SECONDS = 2  # limit per answer, which needs about a hundredth of it
READY, PREPARED, PARSED = "ready", "prepared", "parsed"  # progress lines of the worker
_MAX_REASON = 240
_SECONDS_TO_START = 60.0
ANSWER_SECONDS = 5.0 * CPU_SECONDS  # wall clock, for a busy machine
_WORKER_MODULE = "launcher.judges.sql.worker"
_SOURCE_ROOT = Path(__file__).resolve().parents[3]
_PASSED_VARIABLES = {"PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV"}


class Request(Frozen):
    """One answer to judge, sent to the worker."""

    context: str
    reference: str
    answer: str


class WorkerVerdict(Frozen):
    """Verdict of the worker; None means not judged."""

    parses: bool | None = None
    executes: bool | None = None
    result: bool | None = None
    reason: str = ""


def fail_from(reason: str, *, parses: bool = False, executes: bool = False) -> WorkerVerdict:
    """Return a verdict in which the given check and all that depend on it fail."""
    return WorkerVerdict(parses=parses, executes=executes, result=False, reason=reason)


class SqlJudge(CloseOnExit):
    """Judge that runs all untrusted SQL in one worker process."""

    main_check = "result"

    def __init__(self) -> None:
        self._checks = _make_checks()
        self._worker: Worker | None = None

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks, in order of strictness."""
        return self._checks

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        return [self._judge_one(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def close(self) -> None:
        """Kill the worker, if there is one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _judge_one(self, row: ReferenceRow, answer: str) -> Verdict:
        problem = _find_text_problem(answer)
        if _has_invalid_characters(row.context) or _has_invalid_characters(row.reference):
            return _make_verdict(WorkerVerdict(reason="not judged: the row contains NUL or lone surrogates"))
        # The row alone decides which checks apply, so the worker sees it even if the answer is rejected.
        text = "" if problem else answer
        verdict = self._request(Request(context=row.context, reference=row.reference, answer=text))
        reason = f"it does not parse: {problem}" if problem and verdict.parses is False else verdict.reason
        return _make_verdict(verdict.model_copy(update={"reason": reason}))

    def _request(self, request: Request) -> WorkerVerdict:
        """Return a verdict even if the answer kills the worker or makes it hang: such an answer is wrong."""
        worker = self._get_worker()
        stage = READY
        try:
            worker.write_line(request.model_dump_json(), ANSWER_SECONDS)
            while (line := worker.read_line(ANSWER_SECONDS)) in (PREPARED, PARSED):
                stage = line
            return WorkerVerdict.model_validate_json(line)
        except WorkerError as error:
            self.close()
            is_killed = error.reason is WorkerFailure.EXITED
            what = "took more CPU time or memory than an answer may use" if is_killed else str(error)
            if stage == READY:
                return WorkerVerdict(reason=f"not judged: the row's tables and reference: the worker {what}")
            failed = fail_from(f"it {what}", parses=stage == PARSED)
            if not request.answer:
                return failed
            row = self._request(request.model_copy(update={"answer": ""}))  # says which checks apply
            judged = {name for name in ("parses", "executes", "result") if getattr(row, name) is not None}
            return failed.model_copy(update=dict.fromkeys({"parses", "executes", "result"} - judged))

    def _get_worker(self) -> Worker:
        if self._worker is not None and self._worker.is_alive():
            return self._worker
        self.close()
        environment = {name: value for name, value in os.environ.items() if name in _PASSED_VARIABLES}  # no secrets
        search_path = os.pathsep.join(filter(None, (str(_SOURCE_ROOT), os.environ.get("PYTHONPATH"))))
        environment |= {"PYTHONPATH": search_path, "PYTHONUTF8": "1"}
        command = make_sandboxed_command([sys.executable, "-B", "-m", _WORKER_MODULE])
        self._worker = Worker(command, environment=environment, cwd="/")
        try:
            first_line = self._worker.read_line(_SECONDS_TO_START)
            problem = "" if first_line == READY else f"printed {first_line!r}"
        except WorkerError as error:
            problem = str(error)
        if problem:
            self.close()
            hint = f"to see its error: {sys.executable} -m {_WORKER_MODULE} < /dev/null"
            raise LauncherError(f"the worker that judges SQL did not start: it {problem}", hint=hint)
        return self._worker


def _find_text_problem(answer: str) -> str:
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"it is longer than {MAX_ANSWER_CHARACTERS:,} characters"
    if not answer.strip():
        return "it is empty"
    if _has_invalid_characters(answer):
        return "it contains NUL or lone surrogates"
    return ""


def _has_invalid_characters(text: str) -> bool:
    """NUL ends a text for SQLite; a lone surrogate cannot be encoded as UTF-8."""
    return "\0" in text or any("\ud800" <= char <= "\udfff" for char in text)


def _make_verdict(verdict: WorkerVerdict) -> Verdict:
    checks = {"parses": verdict.parses, "executes": verdict.executes, "result": verdict.result}
    reason = escape(verdict.reason)
    return Verdict(checks=checks, reason=reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 3] + "...")


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
