"""What finding the roles of fields takes and gives: roles that were named, guesses with their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from launcher.corpus.conversations import RowReader
from launcher.corpus.rows import Rejections
from launcher.errors import Problem
from launcher.manifest.dataset import FieldMapping
from launcher.new_expert.names import rate_name
from launcher.new_expert.seeing import FieldSeen, Seen

Kind = Literal["messages", "turn", "task", "templated", "text"]

MOSTLY = 0.5  # of the rows: a field that fewer have plays no main role
FLAGS = "--prompt-field and --answer-field say which is which"
_SHOWN_CHARACTERS = 60
_SHOWN_REASONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """One thing that was decided for the user: what, the value, and why."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenFields:
    """Roles that the user named. None: to be guessed."""

    prompt: str | None = None
    answer: str | None = None
    context: str | None = None
    system: str | None = None
    messages: str | None = None
    text: str | None = None

    def items(self) -> Iterator[tuple[str, str]]:
        for role in ("prompt", "answer", "context", "system", "messages", "text"):
            name = getattr(self, role)
            if name is not None:
                yield role, name


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    kind: Kind
    mapping: FieldMapping
    reader: RowReader
    guesses: tuple[Guess, ...]
    notes: tuple[str, ...] = ()


def is_mostly(seen: Seen, count: int) -> bool:
    return count > 0 and count >= MOSTLY * len(seen.rows)


def say(given: str | None, otherwise: str) -> str:
    return otherwise if given is None else "as given"


def best_named(seen: Seen, names: tuple[str, ...], taken: set[str]) -> str | None:
    """Of the usual names, the one that fits best; a context may be empty in most rows."""
    rated = {
        field.name: rate_name(field.name, names)
        for field in seen.fields.values()
        if field.name not in taken and field.num_text + field.num_objects + field.num_lists - field.num_chats
    }
    best = max(rated, key=lambda name: rated[name], default=None)
    return best if best is not None and rated[best] else None


def tell_field(seen: Seen, name: str, why: str) -> str:
    field = seen.fields[name]
    written = field.num_objects + field.num_lists - field.num_chats
    told = [f"{why}; in {seen.share(field.num_filled)}"]
    if written:
        told.append(f"{written:,} of them written as JSON")
    if 0 < field.num_chats < field.num_filled:
        told.append(f"{field.num_chats:,} of them chat messages")
    return ", ".join(told)


def tell_unused(seen: Seen, used: set[str | None], why: str) -> list[Guess]:
    unused = [name for name in seen.fields if name not in used]
    return [Guess(what="not used", value=", ".join(unused), why=why)] if unused else []


def describe(seen: Seen, field: FieldSeen) -> str:
    count = field.num_filled + field.num_others
    if not count:
        return "empty in all rows"
    example = next((row.fields[field.name] for row in seen.rows if row.fields.get(field.name) is not None), "")
    shown = str(example).replace("\n", " ")
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."
    return f"{field.kind} in {seen.share(count)}, such as {shown!r}"


def describe_all(seen: Seen) -> tuple[Problem, ...]:
    return tuple(Problem(where=field.name, what=describe(seen, field)) for field in seen.fields.values())


def list_reasons(rejections: Rejections) -> tuple[Problem, ...]:
    """Why rows cannot be used, the most frequent first."""
    counted = sorted(rejections.counts.items(), key=lambda item: -item[1])
    return tuple(
        Problem(where=f"{count:,} rows", what=f"{reason} (line {', '.join(map(str, rejections.places[reason][:5]))})")
        for reason, count in counted[:_SHOWN_REASONS]
    )
