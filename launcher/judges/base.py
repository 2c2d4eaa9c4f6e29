"""Interface of judges, which check generated answers against a reference. There is one judge per language."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

NOT_JUDGED = "not judged: "  # begins the checker of a check that lacks a program
CORRECT_CHECK = "right"  # the only check of evaluation.judge_command
MAX_ANSWER_CHARACTERS = 100_000  # a longer answer is wrong without being parsed
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_FENCED = re.compile(r"\s*(?P<fence>`{3,})[ \t]*[\w+#.-]*[ \t]*\r?\n(?P<text>.*?)\s*(?P=fence)\s*", re.S)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRow:
    """A held-out row with its reference answer."""

    instruction: str  # the question
    context: str  # a graph schema, CREATE TABLEs, a JSON Schema; may be empty
    reference: str  # the reference (gold) answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One property of an answer. Later checks of a judge are stricter and may depend on earlier ones."""

    name: str  # in metrics: eval/<name>
    title: str  # in reports: `parses as SQL`
    checker: str  # package and version that checks: `sqlglot 27.1`


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Verdict on one answer: True, False or None (not judged, e.g. because the row has no schema) for each check.

    A check that depends on a failed one is False, too.
    """

    checks: Mapping[str, bool | None]
    reason: str = ""  # why the first check failed, or was not judged


class Judge(Protocol):
    """Judge of generated answers, which compares them with the reference answers of their rows. Close it after use.

    Answers are hostile input: a judge limits time and memory, accesses nothing outside a scratch folder, and never
    raises because of an answer. It may hold processes, which `close` ends.
    """

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks, in order of strictness."""
        ...

    @property
    def main_check(self) -> str:
        """Name of the check whose pass rate is the expert's score."""
        ...

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        ...

    def close(self) -> None:
        """End the processes of the judge."""
        ...


class CloseOnExit:
    """Context manager that calls `close` on exit."""

    def close(self) -> None:
        """Release resources; nothing by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fail_all(checks: Sequence[Check], reason: str) -> Verdict:
    """Return a verdict in which all checks fail."""
    return Verdict(checks={check.name: False for check in checks}, reason=reason)


def keep_applicable(verdict: Verdict, applicable: Collection[str]) -> Verdict:
    """Return a verdict in which checks that do not apply to the row, whatever the answer is, are None."""
    checks = {name: passed if name in applicable else None for name, passed in verdict.checks.items()}
    return Verdict(checks=checks, reason=verdict.reason)


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text has a lone surrogate, which UTF-8 cannot encode."""
    return not text.isascii() and _LONE_SURROGATE.search(text) is not None


def has_invalid_characters(text: str) -> bool:
    """Return whether a text has a lone surrogate, or NUL, which ends a text in SQLite and in other parsers."""
    return "\0" in text or has_lone_surrogate(text)


def strip_code_fence(answer: str) -> str:
    """Return the content of an answer that is one fenced Markdown block; any other answer is returned unchanged."""
    if not answer.lstrip().startswith("```"):
        return answer
    match = _FENCED.fullmatch(answer)
    return match["text"] if match and "```" not in match["text"] else answer
