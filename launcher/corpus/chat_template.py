"""The tokenizer's own chat template (Jinja), rendered in a sandbox, with the answers found by rendering prefixes."""

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

from launcher.corpus.conversations import Conversation
from launcher.corpus.templates import Segment, join_context, merge_segments
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.errors import InputError


class TemplateRefusesError(Exception):
    """The template will not render this conversation: the reason under which the row is counted."""


class _GenerationTag(Extension):
    """{% generation %} marks answers in some templates; they are found by rendering prefixes, so it adds nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, kw_only=True)
class TokenizerTemplate:
    """What a base was trained with. Foreign code: it runs in Jinja's immutable sandbox."""

    tokenizer: BaseTokenizer
    source: str
    end_token: str
    name: str = "tokenizer"

    @property
    def text(self) -> str:
        return self.source

    @cached_property
    def _template(self) -> Any:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        # A date in a prompt would make the store depend on the day; training data has none to tell.
        environment.globals["strftime_now"] = datetime(2024, 1, 1).strftime
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise InputError(f"{self.tokenizer.folder}: broken chat template: {error}") from None

    def render(self, conversation: Conversation) -> tuple[Segment, ...]:
        return tuple(merge_segments(self._pieces(conversation)))

    def _pieces(self, conversation: Conversation) -> Iterator[Segment]:
        """Every answer whose prefix the template renders the same way with and without what follows."""
        turns = [{"role": m.role, "content": join_context(m)} for m in conversation.messages]
        whole, position = self._run(turns, prompt=False), 0
        for index, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            prompt = self._run(turns[:index], prompt=True)
            answered = self._run(turns[: index + 1], prompt=False)
            end = self._end_of_answer(answered, len(prompt))
            if whole.startswith(prompt) and whole.startswith(answered[:end]) and len(prompt) >= position:
                yield Segment(whole[position : len(prompt)], False)
                yield Segment(whole[len(prompt) : end], True)
                position = end
        yield Segment(whole[position:], False)

    def _end_of_answer(self, text: str, start: int) -> int:
        """Behind the end token; what the template writes after it (a newline) is not the answer."""
        found = text.rfind(self.end_token, start)
        return len(text) if found < 0 else found + len(self.end_token)

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
        except Exception as error:  # foreign code: it may raise anything, even on rows of another kind
            raise TemplateRefusesError(f"the chat template refuses it: {str(error)[:80]}") from None
        return text


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own escapes < and > for web pages; these templates are written for one that does not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusesError(message)


def make_tokenizer_template(tokenizer: BaseTokenizer) -> TokenizerTemplate:
    source = tokenizer.chat_template
    end = tokenizer.end_of_text
    if source is None or end is None:
        missing = "chat template" if source is None else "eos_token"
        raise InputError(
            f"{tokenizer.folder}: the tokenizer has no {missing}",
            hint="name a template: base_models[0].prompt_template is one of chatml, qwen3, llama3, alpaca",
        )
    return TokenizerTemplate(tokenizer=tokenizer, source=source, end_token=end)
