"""Convert rows to documents: segments of text with and without loss, ready to be tokenized."""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass, replace
from itertools import takewhile

from launcher.core.errors import InputError
from launcher.corpus.chat_template import TokenizerTemplate, make_tokenizer_template
from launcher.corpus.control_tokens import find_control_tokens, has_escape
from launcher.corpus.conversations import Content, Conversation, RowReader
from launcher.corpus.dialects import cut_segments, find_dialect, find_system
from launcher.corpus.end_token import check_end_token
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.template_sandbox import TemplateRejectsError
from launcher.corpus.templates import (
    CHATML,
    LLAMA3,
    QWEN3,
    AlpacaTemplate,
    Segment,
    Template,
)
from launcher.corpus.tokenizer import BaseTokenizer
from launcher.plan.model import DataPlan

_PUNCTUATION = ".,;:!?\"'\u2018\u2019\u201c\u201d\u2026\u00bf\u00a1"  # at the start or end of a word


@dataclass(frozen=True, slots=True)
class Document:
    """A rendered row as segments of text with and without loss."""

    row: int
    segments: tuple[Segment, ...]
    prompt_hash: int  # of the messages before the first answer: rows with one prompt belong to one split
    has_controls: bool = False  # a field contains the text of a control token
    num_untrained_answers: int = 0  # answers whose place in the rendered text was not found
    system: str = ""  # content of the system message


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
            segments = self.template.render(content) if isinstance(content, Conversation) else self._cut(content)
            trained = self._train_all(content, segments) if self.trains_all and segments else segments
        except TemplateRejectsError as error:
            return BadRow(number=row.number, reason=str(error))
        if segments is None or trained is None:
            return BadRow(number=row.number, reason="templated text without an answer (no assistant marker)")
        if not segments:
            return BadRow(number=row.number, reason="the template renders an empty text")
        has_controls = any(has_escape(segment.text) for segment in segments)
        plain = self._unescape(segments) if has_controls else segments
        return Document(
            row=row.number,
            segments=trained,
            prompt_hash=_hash_prompt(content, plain, self.reader.system_prompt),
            has_controls=has_controls,
            num_untrained_answers=0 if self.trains_all else _count_untrained(content, segments),
            system=_find_system(content),
        )

    def hash_prompt(self, row: Row) -> int | None:
        """Return the hash of a row's prompt, which needs no rendering; None if the row cannot be used."""
        content = self.reader.read(row)
        if isinstance(content, BadRow):
            return None
        segments = () if isinstance(content, Conversation) else self._cut(content)
        if segments is None:
            return None
        return _hash_prompt(content, self._unescape(segments), self.reader.system_prompt)

    def _unescape(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        unescape = self.template.controls.unescape
        return tuple(Segment(unescape(segment.text), segment.is_trained) for segment in segments)

    def _train_all(self, content: Content, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return segments with loss on everything except the answers that a row excludes with `train` or `weight`."""
        if isinstance(content, Conversation) and not all(message.is_trained for message in content.messages):
            messages = tuple(replace(message, is_trained=not message.is_trained) for message in content.messages)
            excluded = self.template.render(replace(content, messages=messages))
            if _count_untrained(replace(content, messages=messages), excluded):
                raise TemplateRejectsError("an answer with train: false is not found in the text of the chat template")
            return tuple(Segment(segment.text, not segment.is_trained) for segment in excluded)
        return (Segment("".join(segment.text for segment in segments), True),)

    def _cut(self, text: str) -> tuple[Segment, ...] | None:
        """Return the segments of a text that was already rendered; None if it has no answer."""
        dialect = find_dialect(text)
        if dialect is not None:
            return cut_segments(text, dialect, self.template)
        if not self.trains_all:
            return None
        start, end = "", self.template.end_token
        if isinstance(self.template, TokenizerTemplate):  # it has not rendered this text, so it wrote no BOS either
            start, end = self.template.tokenizer.start_of_text, self.template.tokenizer.end_of_text or end
        text = text if text.startswith(start) else start + text
        return (Segment(text if text.rstrip().endswith(end) else text + end, True),)


def _find_system(content: Content) -> str:
    if isinstance(content, str):
        return find_system(content)
    return next((message.content for message in content.messages if message.role == "system"), "")


def _count_untrained(content: Content, segments: tuple[Segment, ...]) -> int:
    if not isinstance(content, Conversation):
        return 0
    num_answers = sum(message.role == "assistant" and message.is_trained for message in content.messages)
    return max(0, num_answers - sum(segment.is_trained for segment in segments))


def _hash_prompt(content: Content, segments: tuple[Segment, ...], system_prompt: str) -> int:
    """Return the hash of a row's prompt, or of its text if it has no prompt.

    It does not depend on the template, the dataset's system prompt, or what is trained, so that changing them holds out
    the same rows. Nor does it depend on case, whitespace and punctuation, so that repeated questions are in one split.
    """
    if isinstance(content, Conversation):
        asked = tuple(takewhile(lambda message: message.role != "assistant", content.messages)) or content.messages
        parts = [
            _normalize(part)
            for message in asked
            if (message.role, message.content) != ("system", system_prompt)
            for part in (message.role, message.content, message.context)
        ]
        prompt = "\0".join(parts)
    else:
        prompt = _normalize("".join(s.text for s in segments) if segments[0].is_trained else segments[0].text)
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little")


def _normalize(text: str) -> str:
    """Return a text without differences in case, whitespace and punctuation; a text of punctuation only is kept."""
    words = (word.strip(_PUNCTUATION) for word in unicodedata.normalize("NFKC", text).casefold().split())
    return " ".join(filter(None, words)) or text.strip()


def make_template(
    name: str, tokenizer: BaseTokenizer, end_token: str | None = None, own: str | None = None, file: str = ""
) -> Template:
    """Return a template by name; raises InputError if its end token does not suit the tokenizer or the base model.

    `end_token` is the manifest's choice, for bases whose files name different end tokens. `own` is the source of the
    manifest's own chat template, and `file` its name.
    """
    if own is not None:
        template: Template = make_tokenizer_template(tokenizer, end_token, own, file)
    else:
        template = _find_template(name, tokenizer, end_token)
    check_end_token(template, tokenizer, end_token)
    return template


def make_planned_template(data: DataPlan, tokenizer: BaseTokenizer) -> Template:
    """Return the prompt template that a plan names."""
    file = data.chat_template_file or ""
    return make_template(data.prompt_template, tokenizer, data.end_token, data.chat_template, file)


def _find_template(name: str, tokenizer: BaseTokenizer, end_token: str | None) -> Template:
    if name == "tokenizer":
        return make_tokenizer_template(tokenizer, end_token)
    if name == "alpaca":
        end = end_token or tokenizer.end_of_text
        if end is None:
            raise InputError(
                f"{tokenizer.folder}: the tokenizer has no eos_token, which the alpaca template needs",
                hint="set base_models[0].end_token to the token that ends answers",
            )
        return AlpacaTemplate(end, controls=find_control_tokens(tokenizer.backend, end))
    template = {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3}[name]
    written = template.begin + template.open + template.close
    return replace(template, controls=find_control_tokens(tokenizer.backend, written))
