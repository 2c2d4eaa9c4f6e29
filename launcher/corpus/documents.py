"""Convert rows to documents: segments of text, trained or not, ready to be tokenized."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from launcher.core.errors import InputError
from launcher.corpus.chat_template import TemplateRejectsError, make_tokenizer_template
from launcher.corpus.conversations import Content, Conversation, RowReader, TemplatedText
from launcher.corpus.dialects import cut_segments, find_dialect
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.templates import CHATML, LLAMA3, QWEN3, AlpacaTemplate, Segment, Template
from launcher.corpus.tokenizer import BaseTokenizer


@dataclass(frozen=True, slots=True)
class Document:
    """A row as segments of text."""

    row: int
    segments: tuple[Segment, ...]
    prompt_hash: int  # of the text before the first answer: rows with one prompt belong to one split


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentBuilder:
    """Renders rows with a template."""

    reader: RowReader
    template: Template
    trains_all: bool

    def make(self, row: Row) -> Document | BadRow:
        """Return the document of a row, or why it cannot be used."""
        content = self.reader.read(row)
        if isinstance(content, BadRow):
            return content
        try:
            segments = self._segments(content)
        except TemplateRejectsError as error:
            return BadRow(number=row.number, reason=str(error))
        if segments is None:
            return BadRow(number=row.number, reason="templated text without an answer (no assistant marker)")
        if not segments:
            return BadRow(number=row.number, reason="the template renders an empty text")
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
    """Return the hash of the prompt, or of the full text if there is none; it does not depend on loss_on."""
    first = segments[0]
    prompt = "".join(segment.text for segment in segments) if first.is_trained else first.text
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little")


def make_template(name: str, tokenizer: BaseTokenizer) -> Template:
    """Return a template by name; raises InputError if its end token is not a single token of the tokenizer."""
    template = _find_template(name, tokenizer)
    if not tokenizer.is_one_token(template.end_token):
        raise InputError(
            f"the template {template.name} ends answers with {template.end_token!r}, not a token of this tokenizer",
            hint="set base_models[0].prompt_template to tokenizer to use the base model's own chat template",
        )
    return template


def _find_template(name: str, tokenizer: BaseTokenizer) -> Template:
    if name == "tokenizer":
        return make_tokenizer_template(tokenizer)
    if name == "alpaca":
        end = tokenizer.end_of_text
        if end is None:
            raise InputError(f"{tokenizer.folder}: the tokenizer has no eos_token, which the alpaca template needs")
        return AlpacaTemplate(end)
    return {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3}[name]
