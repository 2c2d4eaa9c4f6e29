"""Render prompts with the templates that training used."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.core.errors import InputError, Problem
from launcher.corpus.conversations import Conversation, Message, make_row_reader
from launcher.corpus.documents import make_planned_template
from launcher.corpus.row_text import RowFormat, list_columns, parse_row_text
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.template_sandbox import TemplateRejectsError
from launcher.corpus.templates import Template
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.manifest.dataset import FieldMapping
from launcher.manifest.suggest import find_closest
from launcher.plan.model import DataPlan, Plan

# Templates render complete conversations. The text before this answer is the prompt.
_PLACEHOLDER_ANSWER = "x"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """A prompt with a placeholder for each field of a row."""

    template: str
    text: str
    fields: tuple[str, ...]  # text.replace(PLACEHOLDERS[i], value of fields[i])
    end_token: str
    adds_bos: bool  # the tokenizer puts its BOS token before the text


# Private-use characters, which no template contains.
PLACEHOLDERS = tuple(chr(0xE000 + number) for number in range(64))


def render_prompt(
    template: Template, question: str, *, context: str = "", system: str = "", history: Sequence[Message] = ()
) -> str:
    """Return the prompt for a question, which TextEncoder encodes: all text before the answer in a training row.

    `history` are the messages of a chat before the question.
    """
    system_turn = (Message("system", system),) if system else ()
    turns = (*system_turn, *history, Message("user", question, context), Message("assistant", _PLACEHOLDER_ANSWER))
    try:
        segments = template.render(Conversation(turns))
    except TemplateRejectsError as error:
        raise InputError(f"the template {template.name} cannot render this question: {error}") from None
    answer = max((at for at, segment in enumerate(segments) if segment.is_trained), default=0)
    if not answer:
        raise InputError(f"the template {template.name} does not mark where an answer begins")
    return "".join(segment.text for segment in segments[:answer])


class Question(NamedTuple):
    """What a user asks: the question, its context, the system message, and the earlier messages of a chat."""

    content: str
    context: str
    system: str
    history: tuple[Message, ...] = ()  # of a chat, before the question

    @property
    def system_message(self) -> str:
        """The prompt's system message: the one that was set, else that of the chat, else empty."""
        return self.system or next((message.content for message in self.history if message.role == "system"), "")


def compose_question(data: DataPlan, question: str, context: str, fields: Mapping[str, str]) -> Question:
    """Return the texts of a prompt, from a question and a context or from the fields of a row; raises InputError."""
    mapping = data.field_mapping
    if mapping.messages is not None and mapping.messages in fields:
        return _read_chat(data, mapping.messages, question, fields)
    texts = (mapping.instruction, mapping.input, mapping.system)
    known = [name for text in texts if text is not None for name in list_columns(parse_row_text(text, ()))]
    problems = []
    for name in fields:
        if name not in known:
            meant = find_closest(name, known)
            problems.append(
                Problem(where=f"--field {name}", what=f"did you mean {meant}?" if meant else "unknown field")
            )
    if problems:
        names = ", ".join(known) or mapping.messages or "none"
        raise InputError("the prompt has no such fields", tuple(problems), hint=f"fields: {names}")
    given = (
        (mapping.instruction, bool(question)),
        (mapping.input, bool(context)),
        (mapping.system, data.system_prompt is not None),
    )
    needed = [name for text, known in given if text and not known for name in list_columns(parse_row_text(text, ()))]
    missing = list(dict.fromkeys(name for name in needed if name not in fields))
    if fields and missing:
        flags = _format_flags(missing)
        raise InputError(f"the prompt also needs {', '.join(missing)}", hint=f"add {flags}; the text may be empty")
    return Question(
        _fill(mapping.instruction, question, fields, "the question"),
        _fill(mapping.input, context, fields, "--input"),
        _fill(mapping.system, "", fields, "") or data.system_prompt or "",
    )


def _read_chat(data: DataPlan, name: str, question: str, fields: Mapping[str, str]) -> Question:
    """Read --field messages=JSON, a list of messages that ends with the user's."""
    hint = f"""--field {name}='[{{"role": "user", "content": "..."}}]'"""
    if question or len(fields) > 1:
        raise InputError(f"--field {name} is the complete chat: omit the question and other --field flags", hint=hint)
    try:
        messages = json.loads(fields[name])
    except ValueError as error:
        raise InputError(f"--field {name}: broken JSON: {error}", hint=hint) from None
    if not isinstance(messages, list):
        raise InputError(f"--field {name}: not a list of messages", hint=hint)
    answered = [*messages, {"role": "assistant", "content": _PLACEHOLDER_ANSWER}]
    reader = make_row_reader(FieldMapping(messages=name), [name], system_prompt=data.system_prompt or "")
    chat = reader.read(Row(number=1, fields={name: answered}))
    if isinstance(chat, BadRow):
        raise InputError(f"--field {name}: {chat.reason}", hint=hint)
    assert isinstance(chat, Conversation)
    *history, last = chat.messages[:-1] or (Message("", ""),)
    if last.role != "user":
        raise InputError(f"--field {name}: the last message must be the user's", hint=hint)
    return Question(last.content, "", "", tuple(history))


def _fill(source: str | None, text: str, fields: Mapping[str, str], name: str) -> str:
    """Return the text of a part of the prompt, from the --field values or from `text` if it consists of one field."""
    if source is None:
        return text
    parsed = parse_row_text(source, ())
    columns = tuple(dict.fromkeys(list_columns(parsed)))
    values = {column: fields.get(column, "") for column in columns}
    if text and (len(columns) > 1 or columns[0] in fields):
        raise InputError(
            f"{name} is built from the fields {', '.join(columns)}", hint=f"give {_format_flags(columns)} instead"
        )
    if text:
        values[columns[0]] = text
    return parsed.fill(values) if isinstance(parsed, RowFormat) else values[parsed]


def _format_flags(fields: Iterable[str]) -> str:
    """Return --field flags for the fields, quoted for a shell."""
    return " ".join(f"--field {shlex.quote(f'{name}=...')}" for name in fields)


def derive_prompt_format(plan: Plan, tokenizer: BaseTokenizer) -> PromptFormat:
    """Return the prompt with placeholders for a row's fields, or for a question if the manifest names no fields."""
    template, mapping = make_planned_template(plan.data, tokenizer), plan.data.field_mapping
    if mapping.instruction is None:
        names = ["question"]
        question = Question(PLACEHOLDERS[0], "", plan.data.system_prompt or "")
    else:
        texts = [text for text in (mapping.instruction, mapping.input, mapping.system) if text is not None]
        names = list(dict.fromkeys(name for text in texts for name in list_columns(parse_row_text(text, ()))))
        question = compose_question(plan.data, "", "", dict(zip(names, PLACEHOLDERS, strict=False)))
    text = render_prompt(template, question.content, context=question.context, system=question.system)
    return PromptFormat(
        template=template.name,
        text=text,
        fields=tuple(names),
        end_token=template.end_token,
        adds_bos=TextEncoder(tokenizer, template).adds_bos(text),
    )
