"""Roles that a field can have (prompt, answer, context, ...), the usual names for each, and why one was chosen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from launcher.core.errors import Problem
from launcher.corpus.conversations import RowReader
from launcher.corpus.rows import Rejections
from launcher.manifest.dataset import FieldMapping
from launcher.new_expert.row_profile import FieldProfile, RowProfile

Kind = Literal["messages", "turn", "task", "templated", "text"]


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split())


# Usual names of fields, the clearest first.
PROMPT_NAMES = _split(
    "instruction prompt question user human problem request query utterance message input source text sentence task"
)
ANSWER_NAMES = _split(
    "response output answer completion assistant target solution reply chosen cypher sql json typescript code query "
    "reference gold expected result translation summary label"
)
CONTEXT_NAMES = _split("context schema input passage document background tables table ddl evidence")
SYSTEM_NAMES = ("system", "system_prompt", "system_message")
MESSAGES_NAMES = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog", "turns", "chosen")
# Metadata of a row: never taken for a prompt or an answer just because no other field is left.
_METADATA_NAMES = frozenset(
    _split(
        "id uuid guid key index idx hash url link name author license date time timestamp created updated lang "
        "language locale database db split category type tag tags topic score rating difficulty rejected"
    )
)
EXACT_NAME, LAST_WORD = 100, 50  # scores of the first name of a table

MAJORITY = 0.5  # share of the rows that a field must have to be the prompt or the answer
FIELD_FLAGS = "name them with --prompt-field and --answer-field"
_SHOWN_CHARACTERS = 60
_SHOWN_REASONS = 5


def split_name(name: str) -> list[str]:
    """Split a field's name into words: `sqlPrompt`, `sql-prompt` and `SQL Prompt` are all sql, prompt."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]


def score_name(name: str, known: tuple[str, ...]) -> int:
    """Score how well a field's name fits a role; 0 if it does not. A complete name scores higher than a part."""
    words = split_name(name)
    joined = "_".join(words)
    if joined in known:
        return EXACT_NAME - known.index(joined)
    # The last word decides: sql_prompt is a prompt, prompt_id is not.
    return LAST_WORD - known.index(words[-1]) if words and words[-1] in known else 0


def is_metadata(name: str) -> bool:
    """Whether the name is that of an id, a date, a category or the like."""
    words = split_name(name)
    return bool(words) and (words[-1] in _METADATA_NAMES or words[0] in ("is", "has", "num"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """One proposed setting, with the reason for its value."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldFlags:
    """Fields given by --prompt-field and the like. None: to be inferred."""

    prompt: str | None = None
    answer: str | None = None
    context: str | None = None
    system: str | None = None
    messages: str | None = None
    text: str | None = None

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield role and field of every flag that was given."""
        for role in ("prompt", "answer", "context", "system", "messages", "text"):
            name = getattr(self, role)
            if name is not None:
                yield role, name


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """How rows are read: the manifest's field mapping, the reader made from it, and the reasons."""

    kind: Kind
    mapping: FieldMapping
    reader: RowReader
    guesses: tuple[Guess, ...]
    notes: tuple[str, ...] = ()


def is_majority(profile: RowProfile, count: int) -> bool:
    """Whether the count is at least half of the rows."""
    return count > 0 and count >= MAJORITY * len(profile.rows)


def find_best_named(profile: RowProfile, names: tuple[str, ...], taken: set[str | None]) -> str | None:
    """Return the free field with the best score for a role; it may be empty in most rows."""
    scores = {
        field.name: score_name(field.name, names)
        for field in profile.fields.values()
        if field.name not in taken and field.num_text + field.num_objects + field.num_lists - field.num_chats
    }
    best = max(scores, key=lambda name: scores[name], default=None)
    return best if best is not None and scores[best] else None


def make_guess(profile: RowProfile, role: str, name: str, reason: str) -> Guess:
    """Guess that a field has a role, with the share of the rows that have it."""
    field = profile.fields[name]
    parts = [f"{reason}; in {profile.format_share(field.num_filled)}"]
    as_json = field.num_objects + field.num_lists - field.num_chats
    if as_json:
        parts.append(f"{as_json:,} of them written as JSON")
    if 0 < field.num_chats < field.num_filled:
        parts.append(f"{field.num_chats:,} of them chat messages")
    return Guess(name=role, value=name, reason=", ".join(parts))


def list_unused(profile: RowProfile, used: set[str | None]) -> list[Guess]:
    """Name the fields that are not trained on, as one guess."""
    unused = [name for name in profile.fields if name not in used]
    return [Guess(name="not used", value=", ".join(unused), reason="no role for these fields")] if unused else []


def describe_fields(profile: RowProfile) -> tuple[Problem, ...]:
    """Describe what every field holds, with an example, as part of an error."""
    return tuple(Problem(where=field.name, what=_describe(profile, field)) for field in profile.fields.values())


def _describe(profile: RowProfile, field: FieldProfile) -> str:
    count = field.num_filled + field.num_others
    if not count:
        return "empty in all rows"
    example = next((row.fields[field.name] for row in profile.rows if row.fields.get(field.name) is not None), "")
    shown = str(example).replace("\n", " ")
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."
    return f"{field.kind} in {profile.format_share(count)}, such as {shown!r}"


def list_reasons(rejections: Rejections) -> tuple[Problem, ...]:
    """List why rows cannot be used, the most frequent reason first."""
    counted = sorted(rejections.counts.items(), key=lambda item: -item[1])
    return tuple(
        Problem(where=f"{count:,} rows", what=f"{reason} (line {', '.join(map(str, rejections.places[reason][:5]))})")
        for reason, count in counted[:_SHOWN_REASONS]
    )
