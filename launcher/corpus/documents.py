"""Rows -> documents: segments of text, trained or not, ready to be tokenised."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from launcher.corpus.chat_template import TemplateRefusesError, make_tokenizer_template
from launcher.corpus.conversations import Content, Conversation, RowReader, TemplatedText
from launcher.corpus.markers import cut_segments, find_dialect
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.templates import CHATML, LLAMA3, QWEN3, AlpacaTemplate, Segment, Template
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.errors import InputError


@dataclass(frozen=True, slots=True)
class Document:
    row: int
    segments: tuple[Segment, ...]
    prompt_hash: int  # of what stands before the first answer: rows that ask the same belong to the same split


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentMaker:
    reader: RowReader
    template: Template
    trains_all: bool

    def make(self, row: Row) -> Document | BadRow:
        content = self.reader.read(row)
        if isinstance(content, BadRow):
            return content
        try:
            segments = self._segments(content)
        except TemplateRefusesError as error:
            return BadRow(number=row.number, reason=str(error))
        if segments is None:
            return BadRow(number=row.number, reason="templated text without an answer (no marker of the assistant)")
        if not segments:
            return BadRow(number=row.number, reason="the template renders it as nothing")
        prompt_hash = _hash_prompt(segments)
        if self.trains_all:
            segments = (Segment("".join(segment.text for segment in segments), True),)
        return Document(row.number, segments, prompt_hash)

    def _segments(self, content: Content) -> tuple[Segment, ...] | None:
        if isinstance(content, Conversation):
            return self.template.render(content)
        return self._cut(content)

    def _cut(self, content: TemplatedText) -> tuple[Segment, ...] | None:
        text = content.text
        dialect = find_dialect(text)
        if dialect is not None:
            return cut_segments(text, dialect, self.template)
        if not self.trains_all:
            return None
        end = self.template.end_token
        return (Segment(text if text.rstrip().endswith(end) else text + end, True),)


def _hash_prompt(segments: tuple[Segment, ...]) -> int:
    """The same whatever is trained; a text without a prompt is its own."""
    first = segments[0]
    prompt = "".join(segment.text for segment in segments) if first.is_trained else first.text
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little")


def make_template(name: str, tokenizer: BaseTokenizer) -> Template:
    """Checked against the tokenizer: an end token that is no token could never be learned as one."""
    template = _find_template(name, tokenizer)
    if not tokenizer.is_one_token(template.end_token):
        raise InputError(
            f"the template {template.name} ends answers with {template.end_token!r}, no token of this tokenizer",
            hint="base_models[0].prompt_template: tokenizer takes the base's own chat template",
        )
    return template


def _find_template(name: str, tokenizer: BaseTokenizer) -> Template:
    if name == "tokenizer":
        return make_tokenizer_template(tokenizer)
    if name == "alpaca":
        end = tokenizer.end_of_text
        if end is None:
            raise InputError(f"{tokenizer.folder}: the tokenizer has no eos_token, which alpaca ends answers with")
        return AlpacaTemplate(end)
    return {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3}[name]
