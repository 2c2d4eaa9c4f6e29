"""Convert rows to conversations, or to already templated text, by the manifest's field mapping."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from launcher.core.errors import InputError, Problem
from launcher.corpus.row_text import (
    RowText,
    UnusableRowError,
    find_missing_fields,
    list_columns,
    look_up,
    parse_row_text,
    read_optional_text,
    read_text,
)
from launcher.corpus.rows import BadRow, Json, Row, RowFault, format_json_error
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.parse_json import is_too_deep

ROLES = ("system", "user", "assistant", "tool")
# Templates read one of these names; a row may use another.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TOOLS_FIELD = "tools"  # definitions of tools, next to a field with messages
# Role names of ShareGPT-like data, and of OpenAI's newer models.
_ROLE_ALIASES = {"human": "user", **dict.fromkeys(("gpt", "bot", "model"), "assistant"), "developer": "system"}
_PYTHON_CHAT = re.compile(r"\s*\[\{'(role|from|content|value)'")  # as pandas writes lists into a CSV file


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    context: str = ""  # a schema, table or document that belongs to a question
    is_trained: bool = True  # unless the row says `train: false` or `weight: 0`
    tool_calls: tuple[Json, ...] = ()  # OpenAI's form: {"type": "function", "function": {"name", "arguments"}}
    keys: Mapping[str, str] = field(default_factory=dict)  # name, tool_call_id and reasoning, as templates read them

    @property
    def reasoning(self) -> str:
        """The reasoning before an answer, if the row has it in a separate key."""
        return self.keys.get(REASONING_KEYS[0], "")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and the definitions of tools."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()


Content = Conversation | str  # a text was already rendered by a chat template

# Tried in this order if a manifest has no field mapping, as in the trainer of the published manifests.
_QUESTION_FIELDS = ("instruction", "prompt", "question", "sql_prompt")
_ANSWER_FIELDS = ("response", "output", "answer", "completion", "cypher", "sql")
_TASK_ANSWER_FIELDS = ("output", "chosen", "response")
_CONTEXT_FIELDS = ("input", "context", "schema", "sql_context")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReader:
    """Reads rows from the fields that hold a complete text, the messages of a chat, or question and answer."""

    text: RowText | None = None
    messages: str | None = None
    system: RowText | None = None
    question: RowText | None = None
    context: RowText | None = None
    answer: RowText | None = None
    task: str | None = None  # an object with the instruction and its context (`multi_task` data)
    system_prompt: str = ""  # of rows without a system message

    def read(self, row: Row) -> Content | BadRow:
        """Return the conversation or text of a row, or a BadRow with the reason why it cannot be used."""
        try:
            if self.text is not None:
                return read_text(row.fields, self.text)
            if self.messages is not None:
                messages = _read_messages(look_up(row.fields, self.messages), self.messages)
                if not any(message.role == "assistant" for message in messages):
                    raise UnusableRowError(f"{self.messages} has no assistant message", RowFault.NO_ANSWER)
                return Conversation(self._with_system(messages, row.fields), _read_tools(row.fields.get(TOOLS_FIELD)))
            if self.task is not None:
                return self._read_task(row.fields, self.task)
            return self._read_turn(row.fields)
        except UnusableRowError as error:
            return BadRow(number=row.number, reason=str(error), fault=error.fault)

    def _read_turn(self, fields: Mapping[str, Json]) -> Conversation:
        assert self.question is not None
        assert self.answer is not None
        question = _read_question(fields, self.question, read_optional_text(fields, self.context))
        answer = _read_answer(fields, self.answer, question)
        return Conversation(self._with_system((*question, *answer), fields))

    def _read_task(self, fields: Mapping[str, Json], name: str) -> Conversation:
        task = fields.get(name)
        if not isinstance(task, dict):
            raise UnusableRowError(f"{name} is not an object")
        others = ((key, read_optional_text(task, key)) for key in task if key != "instruction")
        context = "\n\n".join(f"{key.replace('_', ' ').capitalize()}:\n{text}" for key, text in others if text)
        assert self.answer is not None
        answer = Message("assistant", read_text(fields, self.answer))
        question = Message("user", read_text(task, "instruction"), context)
        return Conversation(self._with_system((question, answer), fields))

    def _with_system(self, messages: tuple[Message, ...], fields: Mapping[str, Json]) -> tuple[Message, ...]:
        """Return the messages with a system message: their own, the one of the system field, or the dataset's."""
        system = read_optional_text(fields, self.system)
        existing = next((message.content for message in messages if message.role == "system"), None)
        if existing is not None and system and existing != system:
            raise UnusableRowError("two system messages: in the messages and in the system field")
        system = system or self.system_prompt
        return messages if existing is not None or not system else (Message("system", system), *messages)

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        texts = (self.text, self.messages, self.task, self.system, self.question, self.context, self.answer)
        return tuple(name for text in texts if text is not None for name in list_columns(text))


def make_row_reader(
    mapping: FieldMapping,
    fields: Sequence[str],
    *,
    task: str | None = None,
    source: str = "the rows",
    system_prompt: str = "",
    hint: str = "",
) -> RowReader:
    """Return a reader for the mapped fields, or for the usual field names if there is no mapping.

    `task` is the field that contains an object with an instruction, if any; `source` names the file in errors, and
    `hint` is added to their hints.
    """
    texts = _parse_mapping(mapping, fields, source, hint)
    answer = _first(_TASK_ANSWER_FIELDS, fields)
    if mapping.text or mapping.messages or mapping.instruction or mapping.answer:
        reader = RowReader(messages=mapping.messages, **texts)
    elif task is not None and answer is not None:
        reader = RowReader(task=task, answer=answer)
    else:
        reader = replace(_guess_reader(fields, source), **texts)
    if reader.text is not None and system_prompt:
        raise InputError(
            f"{source}: training.dataset.system_prompt cannot be put into complete texts ({reader.text})",
            hint="map instruction and response, or messages; or write the system prompt into the texts",
        )
    return replace(reader, system_prompt=system_prompt)


def find_task_field(rows: Iterable[Row]) -> str | None:
    """Return the field that contains an object such as `{"instruction": ..., "schema": ...}`; None if there is none."""
    is_task = any(isinstance(value := row.fields.get("input"), dict) and "instruction" in value for row in rows)
    return "input" if is_task else None


# Key of a field mapping for a complete row -> keys that are not read then.
_COMPLETE = {
    "text": ("messages", "system", "instruction", "input", "response", "output"),
    "messages": ("instruction", "input", "response", "output"),
}
# Role of a reader -> key of a field mapping.
_KEYS = {"text": "text", "system": "system", "question": "instruction", "context": "input", "answer": "response"}


def _parse_mapping(mapping: FieldMapping, fields: Sequence[str], source: str, hint: str) -> dict[str, Any]:
    """Return the fields or formats of the mapping by role; raises InputError for fields that the rows do not have."""
    texts: dict[str, Any] = {}
    problems = []
    named = {role: (key, getattr(mapping, key)) for role, key in _KEYS.items()}
    if mapping.output is not None:
        named["answer"] = ("output", mapping.output)
    for role, (key, value) in {**named, "messages": ("messages", mapping.messages)}.items():
        if value is None:
            continue
        where = f"training.dataset.field_mapping.{key}"
        try:
            text = value if role == "messages" else parse_row_text(value, fields)
        except ValueError as error:
            problems.append(Problem(where=where, what=f"{value!r}: {error}"))
            continue
        problems += [Problem(where=where, what=what) for what in find_missing_fields(text, fields)]
        if role != "messages":
            texts[role] = text
    if not (mapping.text or mapping.messages) and bool(mapping.instruction) != bool(mapping.answer):
        missing = "response" if mapping.instruction else "instruction"
        where = f"training.dataset.field_mapping.{missing}"
        problems.append(Problem(where=where, what="missing: instruction and response must both be mapped"))
    complete = next((key for key in _COMPLETE if getattr(mapping, key)), "")
    for key in _COMPLETE.get(complete, ()):
        if getattr(mapping, key):
            what = f"would not be read, because {complete} maps the complete row: remove one of the two keys"
            problems.append(Problem(where=f"training.dataset.field_mapping.{key}", what=what))
    if problems:
        raise InputError(
            f"{source}: the field mapping does not match the rows",
            tuple(problems),
            hint="; ".join(filter(None, [f"rows have: {', '.join(fields)}", hint])),
        )
    return texts


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


def _read_question(fields: Mapping[str, Json], text: RowText, context: str) -> tuple[Message, ...]:
    """Return the question of a row: one user message, or several messages if the field holds a chat."""
    value = look_up(fields, text) if isinstance(text, str) else None
    if not is_chat(value):
        return (Message("user", read_text(fields, text), context),)
    messages = _read_messages(value, str(text))
    last = messages[-1]
    return (*messages[:-1], replace(last, context=context)) if context else messages


def _read_answer(fields: Mapping[str, Json], text: RowText, question: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the answer; of a chat that repeats the question, as in preference data, only the messages after it."""
    value = look_up(fields, text) if isinstance(text, str) else None
    if is_chat(value) and get_role(value[0]) == "assistant":
        return _read_messages(value, str(text))
    if is_chat(value) and get_role(value[-1]) == "assistant" and all(get_role(turn) in ROLES for turn in value):
        messages = _read_messages(value, str(text))
        asked = tuple(replace(message, context="") for message in question)
        if messages[: len(asked)] == asked and len(messages) > len(asked):
            return messages[len(asked) :]
    return (Message("assistant", read_text(fields, text)),)  # any other list is a JSON answer


def is_chat(value: Json) -> TypeGuard[list[Json]]:
    """Return whether a value is a list of chat messages, whatever their roles are called."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)
        and any(key in turn for turn in value if isinstance(turn, dict) for key in ("content", "value", "tool_calls"))
    )


def get_role(turn: Json) -> Json:
    """Return the role of a message, with aliases such as `human` and `gpt` replaced; unknown roles stay unchanged."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return _ROLE_ALIASES.get(role, role) if isinstance(role, str) else role


def _read_messages(turns: Json, name: str) -> tuple[Message, ...]:
    if isinstance(turns, str):
        turns = _parse_messages(turns, name)
    if not isinstance(turns, list) or not turns:
        raise UnusableRowError(f"{name} is not a list of messages")
    messages = tuple(_read_message(turn) for turn in turns if not _is_empty_system(turn))
    if not messages:
        raise UnusableRowError(f"{name} is empty")
    return messages


def _parse_messages(text: str, name: str) -> Json:
    """Parse messages that a column of a CSV or Parquet file stores as JSON text."""
    what = f"{name} is not a list of messages"
    try:
        turns: Json = json.loads(text)
    except ValueError as error:
        if not text.strip():
            raise UnusableRowError(what) from None
        is_python = _PYTHON_CHAT.match(text) is not None
        reason = "a Python list, which json.dumps writes as JSON" if is_python else format_json_error(error)
        raise UnusableRowError(f"{what}: broken JSON: {reason}") from None
    except RecursionError:
        raise UnusableRowError(f"{what}: nested too deeply") from None
    if is_too_deep(turns):
        raise UnusableRowError(f"{what}: nested too deeply")
    return turns


def looks_like_chat(text: str) -> bool:
    """Return whether a text is JSON of a list of chat messages, or Python's form of one, which is not JSON."""
    if not text.lstrip().startswith("["):
        return False
    try:
        return is_chat(json.loads(text))
    except RecursionError:
        return False
    except ValueError:
        return _PYTHON_CHAT.match(text) is not None


def _is_empty_system(turn: Json) -> bool:
    """Return whether a message is an empty system message, which is ignored: much chat data has one in every row."""
    if not isinstance(turn, dict) or get_role(turn) != "system":
        return False
    content = turn.get("content", turn.get("value"))
    return content is None or (isinstance(content, str) and not content.strip())


def _read_message(turn: Json) -> Message:
    if not isinstance(turn, dict):
        raise UnusableRowError("a message is not an object")
    role = get_role(turn)
    if role not in ROLES:
        raise UnusableRowError(f"a message has an unknown role: {ascii(role)[:40]}", RowFault.UNKNOWN_ROLE)
    name = "content" if "content" in turn else "value"
    content = turn.get(name)
    if isinstance(content, list):  # content parts of chat APIs
        content = _join_parts(content)
    text = read_optional_text({name: content}, name)
    calls = _read_tool_calls(turn, str(role))
    if not text.strip() and not calls:
        raise UnusableRowError(f"a message of role {role} has no text")
    keys = {key: value for key in ("name", "tool_call_id") if isinstance(value := turn.get(key), str)}
    if role == "assistant":
        thoughts = [thought for key in REASONING_KEYS if (thought := read_optional_text(turn, key)).strip()]
        keys |= dict.fromkeys(REASONING_KEYS, thoughts[0]) if thoughts else {}
    return Message(str(role), text, is_trained=_read_is_trained(turn), tool_calls=calls, keys=keys)


def _read_is_trained(turn: Mapping[str, Json]) -> bool:
    """Return whether a message is trained, by its optional keys `train` (true or false) and `weight` (0 or 1)."""
    for key in ("train", "weight"):
        if (value := turn.get(key)) not in (None, 0, 1):  # False == 0
            raise UnusableRowError(f"{key} of a message is {ascii(value)[:20]}, neither true nor false")
    return turn.get("train") in (None, 1) and turn.get("weight") in (None, 1)


def _read_tool_calls(turn: Mapping[str, Json], role: str) -> tuple[Json, ...]:
    if turn.get("function_call"):
        raise UnusableRowError("a message has function_call, the old form of tool_calls", RowFault.TOOL_CALLS)
    calls = turn.get("tool_calls")
    if not calls:
        return ()
    if role != "assistant":
        raise UnusableRowError(f"a message of role {role} has tool calls", RowFault.TOOL_CALLS)
    if not isinstance(calls, list):
        raise UnusableRowError("tool_calls of a message is not a list", RowFault.TOOL_CALLS)
    return tuple(map(_read_tool_call, calls))


def _read_tool_call(call: Json) -> Json:
    """Return a tool call in OpenAI's form, with its arguments as an object, parsed if they are JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRowError("a tool call has no function name", RowFault.TOOL_CALLS)
    arguments = _parse_json(function.get("arguments")) or {}
    if not isinstance(arguments, dict):
        raise UnusableRowError("the arguments of a tool call are not a JSON object", RowFault.TOOL_CALLS)
    others = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function", **others, "function": {"name": function["name"], "arguments": arguments}}


def _read_tools(value: Json) -> tuple[Json, ...]:
    tools = _parse_json(value) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusableRowError(f"{TOOLS_FIELD} is not a list of tool definitions", RowFault.TOOL_CALLS)
    return tuple(tools)


def _parse_json(value: Json) -> Json:
    """Parse JSON text, in which OpenAI's API and tables store objects; any other value is returned unchanged."""
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
        raise UnusableRowError("a chat message has content that is not text (such as images)")
    return "".join(map(str, texts))
