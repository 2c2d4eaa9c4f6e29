"""Row -> conversation, or an already templated text, by the manifest's field mapping."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from launcher.corpus.rows import BadRow, Json, Row
from launcher.errors import InputError, Problem
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.spelling import closest

ROLES = ("system", "user", "assistant", "tool")
# Other names of the roles, as ShareGPT-like data writes them.
_ROLE_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    context: str = ""  # a schema, a table, a document: goes with a question, and templates may set it apart


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TemplatedText:
    text: str


Content = Conversation | TemplatedText

# Tried in this order where a manifest has no field mapping: what the trainer of the published manifests tried.
_QUESTION_FIELDS = ("instruction", "prompt", "question", "sql_prompt")
_ANSWER_FIELDS = ("response", "output", "answer", "completion", "cypher", "sql")
_TASK_ANSWER_FIELDS = ("output", "chosen", "response")
_CONTEXT_FIELDS = ("input", "context", "schema", "sql_context")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReader:
    """Which fields of a row play which role. One of `text`, `messages`, or question and answer."""

    text: str | None = None
    messages: str | None = None
    system: str | None = None
    question: str | None = None
    context: str | None = None
    answer: str | None = None
    task: str | None = None  # an object with the instruction and what goes with it: rows of `multi_task` data

    def read(self, row: Row) -> Content | BadRow:
        try:
            if self.text is not None:
                return TemplatedText(_text_of(row.fields, self.text))
            if self.messages is not None:
                messages = _read_messages(row.fields.get(self.messages), self.messages)
                _check_answered(messages, self.messages)
                return Conversation(_with_system(messages, _optional_text(row.fields, self.system)))
            if self.task is not None:
                return self._read_task(row.fields, self.task)
            return self._read_turn(row.fields)
        except _UnusableError as error:
            return BadRow(number=row.number, reason=str(error))

    def _read_turn(self, fields: Mapping[str, Json]) -> Conversation:
        assert self.question is not None
        assert self.answer is not None
        asked = _read_asked(fields, self.question, _optional_text(fields, self.context))
        answered = _read_answered(fields, self.answer)
        return Conversation(_with_system((*asked, *answered), _optional_text(fields, self.system)))

    def _read_task(self, fields: Mapping[str, Json], name: str) -> Conversation:
        given = fields.get(name)
        if not isinstance(given, dict):
            raise _UnusableError(f"{name} is not an object")
        others = ((key, _optional_text(given, key)) for key in given if key != "instruction")
        context = "\n\n".join(f"{key.replace('_', ' ').capitalize()}:\n{text}" for key, text in others if text)
        assert self.answer is not None
        answer = Message("assistant", _text_of(fields, self.answer))
        return Conversation((Message("user", _text_of(given, "instruction"), context), answer))


class _UnusableError(Exception):
    """A row cannot be used; the message is the reason under which it is counted."""


def make_row_reader(
    mapping: FieldMapping, fields: Sequence[str], task: str | None = None, source: str = "the rows"
) -> RowReader:
    """Checks the mapping against the fields that rows really have; without one, looks for the usual names.

    `task` is the field that holds an object with an instruction, where the rows are of that form; `source` is the
    file's name, for messages.
    """
    if mapping.text or mapping.messages or mapping.instruction or mapping.answer:
        reader = RowReader(
            text=mapping.text,
            messages=mapping.messages,
            system=mapping.system,
            question=mapping.instruction,
            context=mapping.input,
            answer=mapping.answer,
        )
        _check_fields(reader, fields, source)
        return reader
    answer = _first(_TASK_ANSWER_FIELDS, fields)
    if task is not None and answer is not None:
        return RowReader(task=task, answer=answer)
    return _guess_reader(fields, source)


def find_task_field(rows: Iterable[Row]) -> str | None:
    """`input: {"instruction": ..., "schema": ...}`, as the published multi_task data has it."""
    is_task = any(isinstance(given := row.fields.get("input"), dict) and "instruction" in given for row in rows)
    return "input" if is_task else None


def _check_fields(reader: RowReader, fields: Sequence[str], source: str) -> None:
    problems = []
    for role in ("text", "messages", "system", "question", "context", "answer"):
        name = getattr(reader, role)
        if name is not None and name not in fields:
            meant = closest(name, fields)
            what = f"rows have no field {name!r}" + (f"; did you mean {meant!r}?" if meant else "")
            problems.append(Problem(where=f"training.dataset.field_mapping ({role})", what=what))
    if reader.text is None and reader.messages is None and (reader.question is None or reader.answer is None):
        missing = "instruction" if reader.question is None else "response"
        problems.append(
            Problem(where=f"training.dataset.field_mapping.{missing}", what="missing: both sides are needed")
        )
    if problems:
        raise InputError(
            f"{source}: the field mapping does not fit the rows",
            tuple(problems),
            hint=f"rows have: {', '.join(fields)}",
        )


def _guess_reader(fields: Sequence[str], source: str) -> RowReader:
    if "text" in fields:
        return RowReader(text="text")
    for name in ("messages", "conversations"):
        if name in fields:
            return RowReader(messages=name)
    question, answer = _first(_QUESTION_FIELDS, fields), _first(_ANSWER_FIELDS, fields)
    if question is None or answer is None:
        raise InputError(
            f"{source}: the rows have none of the usual fields (text, messages, instruction and response)",
            hint=f"say which is which in training.dataset.field_mapping; rows have: {', '.join(fields)}",
        )
    system = "system" if "system" in fields else None
    return RowReader(system=system, question=question, context=_first(_CONTEXT_FIELDS, fields), answer=answer)


def _first(names: Sequence[str], fields: Sequence[str]) -> str | None:
    return next((name for name in names if name in fields), None)


def _text_of(fields: Mapping[str, Json], name: str) -> str:
    text = _optional_text(fields, name)
    if not text.strip():
        raise _UnusableError(f"{name} is empty" if name in fields else f"no field {name}")
    return text


def _optional_text(fields: Mapping[str, Json], name: str | None) -> str:
    value = fields.get(name) if name is not None else None
    if value is None or (isinstance(value, float) and math.isnan(value)):  # how tables write that there is nothing
        return ""
    # As JSON writes them: an answer that is an object, a number or true, a schema that is a list.
    if isinstance(value, dict | list | int | float):
        value = json.dumps(value, ensure_ascii=False, default=str)  # Parquet has dates
    if not isinstance(value, str):
        raise _UnusableError(f"{name} is of type {type(value).__name__}, not text")
    if not value.isascii() and _has_lone_surrogate(value):
        raise _UnusableError("a lone surrogate: not a character")
    return value


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _read_asked(fields: Mapping[str, Json], name: str, context: str) -> tuple[Message, ...]:
    """A text is what the user says; a list of messages is a chat up to the answer."""
    value = fields.get(name)
    if not is_chat(value):
        return (Message("user", _text_of(fields, name), context),)
    messages = _read_messages(value, name)
    last = messages[-1]
    return (*messages[:-1], Message(last.role, last.content, context)) if context else messages


def _read_answered(fields: Mapping[str, Json], name: str) -> tuple[Message, ...]:
    value = fields.get(name)
    if not is_chat(value) or role_of(value[0]) != "assistant":  # another list is an answer in JSON
        return (Message("assistant", _text_of(fields, name)),)
    return _read_messages(value, name)


def _with_system(messages: tuple[Message, ...], system: str) -> tuple[Message, ...]:
    """What a field of its own says stands first; messages that say it already stay as they are."""
    own = next((message.content for message in messages if message.role == "system"), None)
    if not system or own == system:
        return messages
    if own is not None:
        raise _UnusableError("two system messages: among the messages, and in a field of its own")
    return (Message("system", system), *messages)


def is_chat(value: Json) -> TypeGuard[list[Json]]:
    """Whether a list is meant as messages, whatever the roles are called."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)
        and any(key in turn for turn in value if isinstance(turn, dict) for key in ("content", "value", "tool_calls"))
    )


def role_of(turn: Json) -> Json:
    """By its usual name: system, user, assistant or tool; as it is where it is unknown."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return _ROLE_ALIASES.get(role, role) if isinstance(role, str) else role


def _read_messages(turns: Json, name: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise _UnusableError(f"{name} is not a list of messages")
    messages = tuple(_read_message(turn) for turn in turns if not _is_empty_system(turn))
    if not messages:
        raise _UnusableError(f"{name} is empty")
    return messages


def _check_answered(messages: tuple[Message, ...], name: str) -> None:
    if not any(message.role == "assistant" for message in messages):
        raise _UnusableError(f"{name} has no answer of the assistant")


def _is_empty_system(turn: Json) -> bool:
    """Much chat data has one in every row: it says nothing, and is no reason to lose the row."""
    return (
        isinstance(turn, dict)
        and turn.get("role", turn.get("from")) == "system"
        and turn.get("content", turn.get("value")) in (None, "")
    )


def _read_message(turn: Json) -> Message:
    if not isinstance(turn, dict):
        raise _UnusableError("a message is not an object")
    role = role_of(turn)
    if role not in ROLES:
        raise _UnusableError(f"a message of an unknown role: {ascii(role)[:40]}")
    name = "content" if "content" in turn else "value"
    content = turn.get(name)
    if isinstance(content, list):  # parts, as chat interfaces write them
        content = _join_parts(content)
    text = _optional_text({name: content}, name)
    if not text.strip():
        calls = "tool calls, and " if turn.get("tool_calls") else ""
        raise _UnusableError(f"a message of the {role} has {calls}no text")
    return Message(str(role), text)


def _join_parts(parts: list[Json]) -> str:
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _UnusableError("a message has parts that are not text")
    return "".join(map(str, texts))
