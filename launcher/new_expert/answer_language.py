"""Detect the language of the answers: by patterns first, then by parsing them with the judge of that language."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from launcher.core.errors import LauncherError
from launcher.judges.base import ReferenceRow, strip_code_fence
from launcher.judges.registry import open_judge_by_name

LANGUAGES = ("json", "sql", "cypher", "typescript")
_MIN_SHARE = 0.8  # of the answers must match the pattern, and must parse
_PARSED_ROWS = 24

_SQL = re.compile(
    r"(?:with\b(?=.*\bselect\b)|select\b|insert\s+into\b|update\b(?=.*\bset\b)|delete\s+from\b"
    r"|(?:create|alter|drop)\s+(?:\w+\s+)?(?:table|view|index)\b)",
    re.IGNORECASE | re.DOTALL,
)
_CYPHER = re.compile(
    r"(?:optional\s+match|match|merge|unwind|with|call|create)\b(?=.*(?:\(|\{))"
    r"(?=.*\b(?:return|set|delete|create|merge|remove|yield)\b)",
    re.IGNORECASE | re.DOTALL,
)
_TYPESCRIPT = re.compile(
    r"\b(?:interface\s+\w+[^{\n]*\{|type\s+\w+(?:<[^>]*>)?\s*=|enum\s+\w+\s*\{|(?:const|let)\s+\w+\s*[:=]"
    r"|function\s+\w+\s*(?:<[^>]*>)?\(|class\s+\w+|import\s.*\bfrom\b|export\s)"
)
_TYPED = re.compile(
    r":\s*(?:string|number|boolean|void|unknown|any|never|Promise|Array|Record|[A-Z]\w*)\b|\binterface\s|\btype\s+\w+"
)
# Labels: short answers, each of which several rows have.
_MAX_LABEL, _MIN_LABELLED, _MIN_REPEATS = 60, 10, 3
_COMMENTS = re.compile(r"^(?:\s|--[^\n]*\n|//[^\n]*\n|/\*.*?\*/)+", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """Language of the answers, which selects their judge."""

    name: str
    reason: str
    notes: tuple[str, ...] = ()


def match_language(answers: Sequence[str]) -> tuple[str, int] | None:
    """Return the language whose pattern most answers match, and their number; None if fewer than 80 % match."""
    texts = [_COMMENTS.sub("", strip_code_fence(answer)) for answer in answers]
    counts = {name: sum(map(matches, texts)) for name, matches in _MATCHERS.items()}
    name = max(LANGUAGES, key=lambda language: counts[language])
    return (name, counts[name]) if answers and counts[name] >= _MIN_SHARE * len(answers) else None


def detect_language(questions: Sequence[ReferenceRow]) -> Language | None:
    """Return the language of the reference answers, or None if there is no judge for it."""
    answers = [question.reference for question in questions]
    match = match_language(answers)
    if match is None:
        return _find_labels(answers)
    name, count = match
    return check_language(name, questions, f"{count:,} of {len(questions):,} answers look like it")


def _find_labels(answers: Sequence[str]) -> Language | None:
    """Return `exact_match` if the answers are labels: short texts that occur in several rows each; otherwise None."""
    distinct = {answer.strip() for answer in answers}
    is_short = all(len(label) <= _MAX_LABEL and "\n" not in label for label in distinct)
    if not is_short or len(answers) < _MIN_LABELLED or len(distinct) * _MIN_REPEATS > len(answers):
        return None
    return Language(
        name="exact_match", reason=f"labels: {len(answers):,} rows have {len(distinct):,} different answers"
    )


def check_language(name: str, questions: Sequence[ReferenceRow], reason: str) -> Language | None:
    """Judge some of the reference answers and return their language with notes, or None if too few of them parse."""
    rows = questions[:: max(1, len(questions) // _PARSED_ROWS)][:_PARSED_ROWS]
    try:
        with closing(open_judge_by_name(name)) as judge:
            verdicts = judge.judge(rows, [question.reference for question in rows])
            checker = next((check.checker for check in judge.checks if check.name == "parses"), name)
            main = judge.main_check
    except LauncherError as error:
        return Language(name=name, reason=reason, notes=(f"answers were not parsed: {error.title}; {error.hint}",))
    num_parsed = sum(verdict.checks.get("parses") is True for verdict in verdicts)
    if num_parsed < _MIN_SHARE * len(rows):
        return None
    num_correct = sum(verdict.checks.get(main) is True for verdict in verdicts)
    notes = []
    if num_correct < _MIN_SHARE * len(rows):
        example = next((verdict.reason for verdict in verdicts if verdict.checks.get(main) is not True), "")
        other = "" if num_correct else "; --task exact_match compares answers as text instead"
        notes.append(
            f"the judge can decide correctness ({main}) for {num_correct} of {len(rows)} rows: {example}{other}"
        )
    return Language(name=name, reason=f"{reason}; {num_parsed} of {len(rows)} parse ({checker})", notes=tuple(notes))


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _is_typescript(text: str) -> bool:
    return _TYPESCRIPT.search(text) is not None and _TYPED.search(text) is not None


_MATCHERS: dict[str, Callable[[str], bool]] = {
    "json": _is_json,
    "sql": lambda text: _SQL.match(text) is not None,
    "cypher": lambda text: _CYPHER.match(text) is not None and _SQL.match(text) is None,
    "typescript": _is_typescript,
}
