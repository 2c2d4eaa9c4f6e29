"""Held-out rows for evaluation: the prompt as in training, and the reference answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise

from launcher.core.errors import InputError
from launcher.corpus.build import is_cut_for_validation
from launcher.corpus.conversations import Conversation
from launcher.corpus.dialects import find_dialect, parse_conversation
from launcher.corpus.documents import DocumentBuilder
from launcher.corpus.first_rows import make_source_reader, peek_rows
from launcher.corpus.rows import BadRow
from launcher.corpus.spec import PreparationSpec, Split, WeightedSource


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRow:
    """A held-out row."""

    key: str  # hash of prompt and answer, which identifies a row in any order
    prompt: str  # as the template rendered it, for TextEncoder
    instruction: str
    context: str
    answer: str  # the first, if a chat has several
    num_answers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRows:
    """Held-out rows of one split."""

    split: Split
    source: str
    rows: tuple[HeldOutRow, ...]
    num_rows: int  # total; fewer may be loaded


def load_held_out_rows(
    spec: PreparationSpec, limit: int | None, split: Split | None = None, *, among: int | None = None
) -> HeldOutRows:
    """Load test rows, or validation rows if there is no test split.

    `limit` selects the rows with the smallest hashes, a subset that is stable when rows are added or reordered. `among`
    reads only the first rows of each source.
    """
    for name in (split,) if split is not None else ("test", "validation"):
        sources = _get_sources(spec, name)
        if not sources:
            continue
        by_key = {row.key: row for source in sources for row in islice(_read(spec, source, name), among)}
        if not by_key:
            raise InputError(f"{spec.expert}: the {name} split has no row with an answer")
        rows = tuple(by_key[key] for key in sorted(by_key)[:limit])
        names = ", ".join(source.source.name for source in sources)
        return HeldOutRows(split=name, source=names, rows=rows, num_rows=len(by_key))
    raise InputError(
        f"{spec.expert} has no held-out rows: neither a test nor a validation split",
        hint="set training.dataset.test_path",
    )


def _get_sources(spec: PreparationSpec, split: Split) -> tuple[WeightedSource, ...]:
    if split == "validation" and spec.cuts_validation:
        return spec.train
    return {"train": spec.train, "validation": spec.validation, "test": spec.test}[split]


def _read(spec: PreparationSpec, weighted: WeightedSource, split: Split) -> Iterator[HeldOutRow]:
    rows = weighted.read()
    peeked = peek_rows(rows, spec.data.field_mapping)
    reader = make_source_reader(spec.data.field_mapping, spec.data.system_prompt, weighted.source, peeked)
    maker = DocumentBuilder(reader=reader, template=spec.template, trains_all=False)
    for row in chain(peeked, rows):
        if isinstance(row, BadRow):
            continue
        document = maker.make(row)
        if isinstance(document, BadRow):
            continue
        if split == "validation" and spec.cuts_validation and not is_cut_for_validation(document.prompt_hash):
            continue
        prompt, answers = document.segments[0], document.segments[1:]
        if prompt.is_trained or not answers:
            continue
        content = reader.read(row)
        assert not isinstance(content, BadRow)
        conversation = content if isinstance(content, Conversation) else _parse(content.text)
        unescape = spec.template.controls.unescape
        instruction, context = extract_question(conversation, unescape(prompt.text))
        answer = unescape(answers[0].text.removesuffix(spec.template.end_token)).strip()
        key = hashlib.blake2b(f"{unescape(prompt.text)}\0{answer}".encode(), digest_size=12).hexdigest()
        yield HeldOutRow(
            key=key,
            prompt=prompt.text,
            instruction=instruction,
            context=context,
            answer=answer,
            num_answers=sum(segment.is_trained for segment in answers),
        )


def _parse(text: str) -> Conversation | None:
    dialect = find_dialect(text)
    return None if dialect is None else parse_conversation(text, dialect)


def extract_question(conversation: Conversation | None, prompt: str) -> tuple[str, str]:
    """Return content and context of the user message before the first answer; the full prompt if there is none."""
    for message, following in pairwise(conversation.messages if conversation is not None else ()):
        if message.role == "user" and following.role == "assistant":
            return message.content, message.context
    return prompt, ""
