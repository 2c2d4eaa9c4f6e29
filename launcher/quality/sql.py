"""The judge of SQL. An answer is right where it gives, on databases made for the question, what the reference gives.

One statement, bare or as the only thing in one fenced block; the dialect is SQLite's. Names of columns do not count,
their number and order do; rows count as often as they come, in any order unless the reference sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from launcher.errors import InputError, escape
from launcher.quality.judging import MAX_ANSWER_CHARACTERS, Check, Closing, Question, Verdict
from launcher.quality.sql_process import JudgingProcess
from launcher.quality.sql_ruling import Ruling
from launcher.quality.sql_worker import Request

_MAX_REASON = 240


class SqlJudge(Closing):
    """Holds one process, in which everything hostile happens."""

    main_check = "result"

    def __init__(self) -> None:
        self._checks = _make_checks()
        self._process = JudgingProcess()

    @property
    def checks(self) -> tuple[Check, ...]:
        return self._checks

    def judge(self, questions: Sequence[Question], answers: Sequence[str]) -> list[Verdict]:
        return [self._judge_one(question, answer) for question, answer in zip(questions, answers, strict=True)]

    def close(self) -> None:
        self._process.close()

    def _judge_one(self, question: Question, answer: str) -> Verdict:
        unread = _reject_unread(answer)
        if _is_no_text(question.context) or _is_no_text(question.reference):
            return _make_verdict(Ruling(reason="not judged: the row holds characters that no text has"))
        given = "" if unread else answer  # the row still says which checks it has
        ruling = self._process.ask(Request(context=question.context, reference=question.reference, answer=given))
        reason = f"it does not parse: {unread}" if unread and ruling.parses is False else ruling.reason
        return _make_verdict(ruling.model_copy(update={"reason": reason}))


def _reject_unread(answer: str) -> str:
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"it is longer than {MAX_ANSWER_CHARACTERS:,} characters"
    if not answer.strip():
        return "it is empty"
    if _is_no_text(answer):
        return "it holds characters that no text has"
    return ""


def _is_no_text(text: str) -> bool:
    """NUL ends a text for SQLite; half a surrogate pair has no bytes in UTF-8."""
    return "\0" in text or any("\ud800" <= char <= "\udfff" for char in text)


def _make_verdict(ruling: Ruling) -> Verdict:
    checks = {"parses": ruling.parses, "executes": ruling.executes, "result": ruling.result}
    reason = escape(ruling.reason)
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
