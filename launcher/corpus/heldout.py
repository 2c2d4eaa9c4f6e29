"""Held-out rows for evaluation: the prompt as in training, and the reference answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from launcher.core.errors import InputError
from launcher.corpus.conversations import Conversation
from launcher.corpus.dialects import parse_conversation
from launcher.corpus.documents import Document, DocumentBuilder
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.spec import PreparationSpec, Split, WeightedSource
from launcher.corpus.validation_cut import ValidationCut, read_validation_cut
from launcher.judges.base import ReferenceRow


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
    is the number of held-out rows that are read from each source.
    """
    for name in (split,) if split is not None else ("test", "validation"):
        sources = _get_sources(spec, name)
        if not sources:
            continue
        cut = read_validation_cut(spec) if name == "validation" and spec.cuts_validation else None
        by_key = {row.key: row for source in sources for row in islice(_read(spec, source, cut), among)}
        if not by_key:
            raise InputError(
                f"{spec.expert}: no row of the {name} split has an answer",
                hint="check training.dataset.field_mapping: `launcher prepare` shows how rows are read",
            )
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
    return spec.sources[split]


def _read(spec: PreparationSpec, weighted: WeightedSource, cut: ValidationCut | None) -> Iterator[HeldOutRow]:
    """Yield the rows of a source that have an answer; with a cut of the training rows, only those it holds out."""
    builder, rows = spec.open_rows(weighted)
    builder = replace(builder, trains_all=False)
    for row in rows:
        if isinstance(row, BadRow):
            continue
        document = builder.make(row)
        if isinstance(document, BadRow):
            continue
        if cut is not None and not cut.holds_out(document.prompt_hash):
            continue
        prompt = document.segments[0]
        if prompt.is_trained or len(document.segments) == 1:
            continue
        question = extract_question(builder, row, document)
        text = f"{spec.template.controls.unescape(prompt.text)}\0{question.reference}"
        yield HeldOutRow(
            key=hashlib.blake2b(text.encode(), digest_size=12).hexdigest(),
            prompt=prompt.text,
            instruction=question.instruction,
            context=question.context,
            answer=question.reference,
            num_answers=sum(segment.is_trained for segment in document.segments[1:]),
        )


def extract_question(builder: DocumentBuilder, row: Row, document: Document) -> ReferenceRow:
    """Return a row's first answer, and the user message before it, or the full prompt if there is no such message."""
    content = builder.reader.read(row)
    assert not isinstance(content, BadRow), "the document was made from it"
    conversation = content if isinstance(content, Conversation) else parse_conversation(content)
    unescape = builder.template.controls.unescape
    answer = next((segment.text for segment in document.segments if segment.is_trained), "")
    reference = unescape(answer.removesuffix(builder.template.end_token)).strip()
    for message, following in pairwise(conversation.messages if conversation is not None else ()):
        if message.role == "user" and following.role == "assistant":
            return ReferenceRow(instruction=message.content, context=message.context, reference=reference)
    return ReferenceRow(instruction=unescape(document.segments[0].text), context="", reference=reference)
