"""What a judge is, and what it says of an answer. One judge a language; each says who looked: package and version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

MAX_ANSWER_CHARACTERS = 100_000  # no answer of any expert is that long: it is wrong unread


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A held-out row, as a judge sees it."""

    instruction: str  # what was asked
    context: str  # what it was asked about: a graph schema, CREATE TABLEs, a JSON Schema; may be empty
    reference: str  # the answer that the row has


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One property of an answer. Later checks of a judge are stricter, and may rest on earlier ones."""

    name: str  # in metrics: eval/<name>
    title: str  # for people: `parses as SQL`
    checker: str  # who looks: `sqlglot 27.1`; what is missing is said by naming what judges instead


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """True: passed, False: failed, None: nobody could tell (no schema to compare with, an engine that lacks a feature);
    a check that rests on one that failed has failed, too."""

    checks: Mapping[str, bool | None]
    reason: str = ""  # why the first check that failed did, or why one could not tell, in a sentence for people


class Judge(Protocol):
    """Answers are hostile input: a judge bounds time and memory, touches nothing outside a scratch folder, and never
    raises because of an answer. It may hold processes, which `close` ends; it is used as a context manager."""

    @property
    def checks(self) -> tuple[Check, ...]: ...

    @property
    def main_check(self) -> str:
        """The one that an expert is measured by."""
        ...

    def judge(self, questions: Sequence[Question], answers: Sequence[str]) -> list[Verdict]: ...

    def close(self) -> None: ...


class Closing:
    """Closed at the end of a `with`."""

    def close(self) -> None:
        """Processes that it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fail_all(checks: Sequence[Check], reason: str) -> Verdict:
    return Verdict(checks={check.name: False for check in checks}, reason=reason)
