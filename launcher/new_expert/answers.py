"""In which language are the answers? By their looks, and then by the judge that would judge them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from launcher.errors import LauncherError
from launcher.quality.fences import unfence
from launcher.quality.judges import open_named_judge
from launcher.quality.judging import Question

LANGUAGES = ("json", "sql", "cypher", "typescript")
_MOSTLY = 0.8  # of the answers look like it, and parse
_ASKED_ROWS = 24

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
_COMMENTS = re.compile(r"^(?:\s|--[^\n]*\n|//[^\n]*\n|/\*.*?\*/)+", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """What the answers are written in, and what its judge says of the rows' own answers."""

    name: str
    why: str
    notes: tuple[str, ...] = ()


def guess_language(answers: Sequence[str]) -> tuple[str, int] | None:
    """Name, and how many of the answers look like it. Pure."""
    counts = {name: sum(map(looks, answers)) for name, looks in _LOOKS.items()}
    name = max(LANGUAGES, key=lambda language: counts[language])
    return (name, counts[name]) if answers and counts[name] >= _MOSTLY * len(answers) else None


def find_language(questions: Sequence[Question]) -> Language | None:
    """None: nobody here can judge them."""
    guessed = guess_language([question.reference for question in questions])
    if guessed is None:
        return None
    name, count = guessed
    looks = f"{count:,} of {len(questions):,} answers look like it"
    return ask_judge(name, questions, looks)


def ask_judge(name: str, questions: Sequence[Question], looks: str) -> Language | None:
    """The rows' own answers, judged. None where they do not parse: then they only looked like it."""
    step = max(1, len(questions) // _ASKED_ROWS)
    asked = questions[::step][:_ASKED_ROWS]
    try:
        with closing(open_named_judge(name)) as judge:
            verdicts = judge.judge(asked, [question.reference for question in asked])
            checker = next((check.checker for check in judge.checks if check.name == "parses"), name)
            main = judge.main_check
    except LauncherError as error:
        return Language(name=name, why=looks, notes=(f"nobody tried to parse them: {error.title}; {error.hint}",))
    parsed = sum(verdict.checks.get("parses") is True for verdict in verdicts)
    if parsed < _MOSTLY * len(asked):
        return None
    right = sum(verdict.checks.get(main) is True for verdict in verdicts)
    notes = []
    if right < _MOSTLY * len(asked):
        reason = next((verdict.reason for verdict in verdicts if verdict.checks.get(main) is not True), "")
        notes.append(
            f"of {right} of {len(asked)} rows the judge can tell whether an answer is right ({main}): {reason}"
        )
    return Language(name=name, why=f"{looks}; {parsed} of {len(asked)} parse ({checker})", notes=tuple(notes))


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _is_typescript(text: str) -> bool:
    return _TYPESCRIPT.search(text) is not None and _TYPED.search(text) is not None


def _bare(looks: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda answer: looks(_COMMENTS.sub("", unfence(answer)))


_LOOKS: dict[str, Callable[[str], bool]] = {
    "json": _bare(_is_json),
    "sql": _bare(lambda text: _SQL.match(text) is not None),
    "cypher": _bare(lambda text: _CYPHER.match(text) is not None and _SQL.match(text) is None),
    "typescript": _bare(_is_typescript),
}
