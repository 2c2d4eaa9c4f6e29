"""The tokenizer's own chat template (Jinja), rendered in a sandbox; answers are located by rendering prefixes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.core.errors import InputError
from launcher.corpus.conversations import Conversation
from launcher.corpus.templates import Segment, join_context, merge_segments
from launcher.corpus.tokenizer import BaseTokenizer


class TemplateRejectsError(Exception):
    """The template rejects a conversation; the message is the reason for which the row is rejected."""


class _GenerationTag(Extension):
    """Ignores {% generation %}, which marks answers in some templates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, kw_only=True)
class TokenizerTemplate:
    """The chat template of a base model. It is untrusted code and runs in Jinja's immutable sandbox."""

    tokenizer: BaseTokenizer
    source: str
    end_token: str
    name: str = "tokenizer"

    @property
    def text(self) -> str:
        """The template source, which is part of the key of prepared data."""
        return self.source

    @cached_property
    def _template(self) -> Any:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _reject
        # A fixed date: the current one would make the prepared data depend on the day.
        environment.globals["strftime_now"] = datetime(2024, 1, 1).strftime
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise InputError(f"{self.tokenizer.folder}: invalid chat template: {error}") from None

    def render(self, conversation: Conversation) -> tuple[Segment, ...]:
        """Return the segments of a conversation."""
        return tuple(merge_segments(self._pieces(conversation)))

    def _pieces(self, conversation: Conversation) -> Iterator[Segment]:
        """Yield segments; an answer is trained if its prefix renders the same with and without what follows."""
        turns = [{"role": m.role, "content": join_context(m)} for m in conversation.messages]
        full, position = self._run(turns, prompt=False), 0
        for index, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            prompt = self._run(turns[:index], prompt=True)
            answered = self._run(turns[: index + 1], prompt=False)
            end = self._end_of_answer(answered, len(prompt))
            if full.startswith(prompt) and full.startswith(answered[:end]) and len(prompt) >= position:
                yield Segment(full[position : len(prompt)], False)
                yield Segment(full[len(prompt) : end], True)
                position = end
        yield Segment(full[position:], False)

    def _end_of_answer(self, text: str, start: int) -> int:
        """Return the position after the end token; a newline after it is not part of the answer."""
        index = text.rfind(self.end_token, start)
        return len(text) if index < 0 else index + len(self.end_token)

    def _run(self, turns: list[dict[str, str]], *, prompt: bool) -> str:
        tokens = {name: self.tokenizer.special_token(name) or "" for name in ("bos_token", "eos_token", "pad_token")}
        template = self._template
        try:
            text: str = template.render(
                messages=turns,
                add_generation_prompt=prompt,
                enable_thinking=False,
                tools=None,
                documents=None,
                **tokens,
            )
        except Exception as error:  # untrusted code may raise anything
            raise TemplateRejectsError(f"the chat template rejects it: {str(error)[:80]}") from None
        return text


def _to_json(value: object, indent: int | None = None) -> str:
    """Serialize JSON without escaping < and >, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _reject(message: str) -> NoReturn:
    raise TemplateRejectsError(message)


def make_tokenizer_template(tokenizer: BaseTokenizer) -> TokenizerTemplate:
    """Return the chat template of a tokenizer; raises InputError if it has none."""
    source = tokenizer.chat_template
    end = tokenizer.end_of_text
    if source is None or end is None:
        missing = "chat template" if source is None else "eos_token"
        raise InputError(
            f"{tokenizer.folder}: the tokenizer has no {missing}",
            hint="set base_models[0].prompt_template to one of chatml, qwen3, llama3, alpaca",
        )
    return TokenizerTemplate(tokenizer=tokenizer, source=source, end_token=end)
