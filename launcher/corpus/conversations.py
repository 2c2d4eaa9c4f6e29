"""Convert rows to conversations, or to already templated text, by the manifest's field mapping."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from launcher.core.errors import InputError, Problem
from launcher.corpus.rows import BadRow, Json, Row, RowFault
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.suggest import find_closest

ROLES = ("system", "user", "assistant", "tool")
TOOLS_FIELD = "tools"  # definitions of tools, next to a field with messages
# Role names of ShareGPT-like data.
_ROLE_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    context: str = ""  # a schema, table or document that belongs to a question
    is_trained: bool = True  # unless the row says `train: false` or `weight: 0`
    tool_calls: tuple[Json, ...] = ()  # OpenAI's form: {"type": "function", "function": {"name", "arguments"}}
    keys: Mapping[str, str] = field(default_factory=dict)  # name and tool_call_id, which some templates read


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and the definitions of tools."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()


@dataclass(frozen=True, slots=True)
class TemplatedText:
    """Text that was already rendered by a chat template."""

    text: str


Content = Conversation | TemplatedText

# Tried in this order if a manifest has no field mapping, as in the trainer of the published manifests.
_QUESTION_FIELDS = ("instruction", "prompt", "question", "sql_prompt")
_ANSWER_FIELDS = ("response", "output", "answer", "completion", "cypher", "sql")
_TASK_ANSWER_FIELDS = ("output", "chosen", "response")
_CONTEXT_FIELDS = ("input", "context", "schema", "sql_context")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReader:
    """The fields of a row by role: `text`, `messages`, or question and answer."""

    text: str | None = None
    messages: str | None = None
    system: str | None = None
    question: str | None = None
    context: str | None = None
    answer: str | None = None
    task: str | None = None  # an object with the instruction and its context (`multi_task` data)

    def read(self, row: Row) -> Content | BadRow:
        """Convert a row; a BadRow says why it cannot be used."""
        try:
            if self.text is not None:
                return TemplatedText(_text_of(row.fields, self.text))
            if self.messages is not None:
                messages = _read_messages(row.fields.get(self.messages), self.messages)
                _check_answered(messages, self.messages)
                messages = _with_system(messages, _optional_text(row.fields, self.system))
                return Conversation(messages, _read_tools(row.fields.get(TOOLS_FIELD)))
            if self.task is not None:
                return self._read_task(row.fields, self.task)
            return self._read_turn(row.fields)
        except _UnusableError as error:
            return BadRow(number=row.number, reason=str(error), fault=error.fault)

    def _read_turn(self, fields: Mapping[str, Json]) -> Conversation:
        assert self.question is not None
        assert self.answer is not None
        question = _read_question(fields, self.question, _optional_text(fields, self.context))
        answer = _read_answer(fields, self.answer)
        return Conversation(_with_system((*question, *answer), _optional_text(fields, self.system)))

    def _read_task(self, fields: Mapping[str, Json], name: str) -> Conversation:
        task = fields.get(name)
        if not isinstance(task, dict):
            raise _UnusableError(f"{name} is not an object")
        others = ((key, _optional_text(task, key)) for key in task if key != "instruction")
        context = "\n\n".join(f"{key.replace('_', ' ').capitalize()}:\n{text}" for key, text in others if text)
        assert self.answer is not None
        answer = Message("assistant", _text_of(fields, self.answer))
        return Conversation((Message("user", _text_of(task, "instruction"), context), answer))


class _UnusableError(Exception):
    """A row cannot be used; the message is the reason for which it is rejected."""

    def __init__(self, reason: str, fault: RowFault = RowFault.OTHER) -> None:
        super().__init__(reason)
        self.fault = fault


def make_row_reader(
    mapping: FieldMapping, fields: Sequence[str], task: str | None = None, source: str = "the rows"
) -> RowReader:
    """Return a reader for the mapped fields, or for the usual field names if there is no mapping.

    `task` is the field that contains an object with an instruction, if any; `source` is the file name for messages.
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
    """Return the field that contains an object such as `{"instruction": ..., "schema": ...}`; None if there is none."""
    is_task = any(isinstance(value := row.fields.get("input"), dict) and "instruction" in value for row in rows)
    return "input" if is_task else None


def _check_fields(reader: RowReader, fields: Sequence[str], source: str) -> None:
    problems = []
    for role in ("text", "messages", "system", "question", "context", "answer"):
        name = getattr(reader, role)
        if name is not None and name not in fields:
            meant = find_closest(name, fields)
            what = f"rows have no field {name!r}" + (f"; did you mean {meant!r}?" if meant else "")
            problems.append(Problem(where=f"training.dataset.field_mapping ({role})", what=what))
    if reader.text is None and reader.messages is None and (reader.question is None or reader.answer is None):
        missing = "instruction" if reader.question is None else "response"
        problems.append(
            Problem(
                where=f"training.dataset.field_mapping.{missing}",
                what="missing: both sides are required",
            )
        )
    if problems:
        raise InputError(
            f"{source}: the field mapping does not match the rows",
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
            hint=f"set training.dataset.field_mapping; rows have: {', '.join(fields)}",
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
    if value is None or (isinstance(value, float) and math.isnan(value)):  # missing value of a table
        return ""
    # Non-text values as JSON: an answer may be an object or a number, a schema a list.
    if isinstance(value, dict | list | int | float):
        try:
            value = json.dumps(value, ensure_ascii=False, default=_format_other, allow_nan=False)
        except ValueError:
            raise _UnusableError(f"{name} contains NaN or Infinity, which is not JSON") from None
    if not isinstance(value, str):
        raise _UnusableError(f"{name} is of type {type(value).__name__}, not text")
    if not value.isascii() and _has_lone_surrogate(value):
        raise _UnusableError("contains a lone surrogate")
    return value


def _format_other(value: object) -> str:
    """Format a value that JSON does not have: dates of Parquet, but no bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise _UnusableError("contains bytes, which are not text")
    return str(value)


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _read_question(fields: Mapping[str, Json], name: str, context: str) -> tuple[Message, ...]:
    """Return a user message, or the messages of a chat up to the answer."""
    value = fields.get(name)
    if not is_chat(value):
        return (Message("user", _text_of(fields, name), context),)
    messages = _read_messages(value, name)
    last = messages[-1]
    return (*messages[:-1], replace(last, context=context)) if context else messages


def _read_answer(fields: Mapping[str, Json], name: str) -> tuple[Message, ...]:
    value = fields.get(name)
    if not is_chat(value) or get_role(value[0]) != "assistant":  # any other list is a JSON answer
        return (Message("assistant", _text_of(fields, name)),)
    return _read_messages(value, name)


def _with_system(messages: tuple[Message, ...], system: str) -> tuple[Message, ...]:
    """Put the system field first, unless the messages already contain it."""
    existing = next((message.content for message in messages if message.role == "system"), None)
    if not system or existing == system:
        return messages
    if existing is not None:
        raise _UnusableError("two system messages: in the messages and in the system field")
    return (Message("system", system), *messages)


def is_chat(value: Json) -> TypeGuard[list[Json]]:
    """Return whether a value is a list of messages with any role names."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)
        and any(key in turn for turn in value if isinstance(turn, dict) for key in ("content", "value", "tool_calls"))
    )


def get_role(turn: Json) -> Json:
    """Return the role of a message by its usual name; unknown roles are returned unchanged."""
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
        raise _UnusableError(f"{name} has no assistant message", RowFault.NO_ANSWER)


def _is_empty_system(turn: Json) -> bool:
    """Return whether it is an empty system message, which is ignored: much chat data has one in every row."""
    return (
        isinstance(turn, dict)
        and turn.get("role", turn.get("from")) == "system"
        and turn.get("content", turn.get("value")) in (None, "")
    )


def _read_message(turn: Json) -> Message:
    if not isinstance(turn, dict):
        raise _UnusableError("a message is not an object")
    role = get_role(turn)
    if role not in ROLES:
        raise _UnusableError(f"a message has an unknown role: {ascii(role)[:40]}", RowFault.UNKNOWN_ROLE)
    name = "content" if "content" in turn else "value"
    content = turn.get(name)
    if isinstance(content, list):  # content parts of chat APIs
        content = _join_parts(content)
    text = _optional_text({name: content}, name)
    calls = _read_tool_calls(turn, str(role))
    if not text.strip() and not calls:
        raise _UnusableError(f"a message of role {role} has no text")
    keys = {key: value for key in ("name", "tool_call_id") if isinstance(value := turn.get(key), str)}
    return Message(str(role), text, is_trained=_read_is_trained(turn), tool_calls=calls, keys=keys)


def _read_is_trained(turn: Mapping[str, Json]) -> bool:
    """Return whether a message is trained: `train` is false or true, `weight` 0 or 1, both are optional."""
    for key in ("train", "weight"):
        if (value := turn.get(key)) not in (None, 0, 1):  # False == 0
            raise _UnusableError(f"{key} of a message is {ascii(value)[:20]}, neither true nor false")
    return turn.get("train") in (None, 1) and turn.get("weight") in (None, 1)


def _read_tool_calls(turn: Mapping[str, Json], role: str) -> tuple[Json, ...]:
    if turn.get("function_call"):
        raise _UnusableError("a message has function_call, the old form of tool_calls", RowFault.TOOL_CALLS)
    calls = turn.get("tool_calls")
    if not calls:
        return ()
    if role != "assistant":
        raise _UnusableError(f"a message of role {role} has tool calls", RowFault.TOOL_CALLS)
    if not isinstance(calls, list):
        raise _UnusableError("tool_calls of a message is not a list", RowFault.TOOL_CALLS)
    return tuple(map(_read_tool_call, calls))


def _read_tool_call(call: Json) -> Json:
    """Return a tool call with its arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _UnusableError("a tool call has no function name", RowFault.TOOL_CALLS)
    arguments = _parse_json(function.get("arguments")) or {}
    if not isinstance(arguments, dict):
        raise _UnusableError("the arguments of a tool call are not a JSON object", RowFault.TOOL_CALLS)
    others = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function", **others, "function": {"name": function["name"], "arguments": arguments}}


def _read_tools(value: Json) -> tuple[Json, ...]:
    tools = _parse_json(value) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _UnusableError(f"{TOOLS_FIELD} is not a list of tool definitions", RowFault.TOOL_CALLS)
    return tuple(tools)


def _parse_json(value: Json) -> Json:
    """Parse a text that is JSON; OpenAI's API and tables store objects as text."""
    if not isinstance(value, str):
        return value
    try:
        parsed: Json = json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value
    return parsed


def _join_parts(parts: list[Json]) -> str:
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _UnusableError("a chat message has content that is not text (such as images)")
    return "".join(map(str, texts))
