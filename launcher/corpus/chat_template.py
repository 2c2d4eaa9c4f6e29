"""The tokenizer's own chat template (Jinja), rendered in a sandbox; answers are located by rendering prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from launcher.core.errors import InputError
from launcher.corpus.conversations import Conversation
from launcher.corpus.template_sandbox import (
    TemplateLimitError,
    TemplateRejectsError,
    check_template,
    compile_template,
    render_template,
)
from launcher.corpus.templates import Segment, join_context, merge_segments
from launcher.corpus.tokenizer import BaseTokenizer

__all__ = ["TemplateRejectsError", "TokenizerTemplate", "make_tokenizer_template"]

_HINT = "set base_models[0].prompt_template to one of chatml, qwen3, llama3, alpaca"


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
        problem = check_template(self.source)
        if problem:
            raise InputError(f"{self.tokenizer.folder}: the chat template cannot be used: {problem}", hint=_HINT)
        try:
            return compile_template(self.source)
        except Exception as error:  # untrusted code may raise anything
            raise InputError(f"{self.tokenizer.folder}: invalid chat template: {error}", hint=_HINT) from None

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
            return render_template(template, turns, prompt=prompt, tokens=tokens)
        except TemplateLimitError as error:
            raise InputError(f"{self.tokenizer.folder}: the chat template {error}", hint=_HINT) from None
        except Exception as error:  # untrusted code may raise anything
            raise TemplateRejectsError(f"the chat template rejects it: {str(error)[:80]}") from None


def make_tokenizer_template(tokenizer: BaseTokenizer) -> TokenizerTemplate:
    """Return the chat template of a tokenizer; raises InputError if it has none."""
    source = tokenizer.chat_template
    end = tokenizer.end_of_text
    if source is None or end is None:
        missing = "chat template" if source is None else "eos_token"
        raise InputError(
            f"{tokenizer.folder}: the tokenizer has no {missing}",
            hint=_HINT,
        )
    return TokenizerTemplate(tokenizer=tokenizer, source=source, end_token=end)
