"""Held-out rows as questions: the prompt that training would have shown, and the answer that it would have taught."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise

from launcher.corpus.build import PEEKED_ROWS, is_cut_for_validation, make_source_reader
from launcher.corpus.conversations import Conversation
from launcher.corpus.documents import DocumentMaker
from launcher.corpus.markers import find_dialect, parse_conversation
from launcher.corpus.preparation import Preparation, Split, WeightedSource
from launcher.corpus.rows import BadRow
from launcher.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRow:
    key: str  # of prompt and answer: the same rows are known again, wherever they stand
    prompt: str
    instruction: str
    context: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    split: Split
    source: str
    rows: tuple[HeldOutRow, ...]
    num_rows: int  # that there are


def read_held_out(
    wanted: Preparation, limit: int | None, split: Split | None = None, *, among: int | None = None
) -> HeldOut:
    """The test rows, or where there are none those for validation. Some of them are those with the smallest hashes:
    a slice that stays what it is when rows are added or reordered. `among`: of the first so many of each source, for
    those who cannot wait for the last."""
    for name in (split,) if split is not None else ("test", "validation"):
        sources = _find_sources(wanted, name)
        if not sources:
            continue
        found = {row.key: row for source in sources for row in islice(_read(wanted, source, name), among)}
        if not found:
            raise InputError(f"{wanted.expert}: the {name} split has no row with an answer")
        rows = tuple(found[key] for key in sorted(found)[:limit])
        told = ", ".join(source.source.name for source in sources)
        return HeldOut(split=name, source=told, rows=rows, num_rows=len(found))
    raise InputError(
        f"{wanted.expert} has no held-out rows to ask: neither a test nor a validation split",
        hint="training.dataset.test_path names a file of them",
    )


def _find_sources(wanted: Preparation, split: Split) -> tuple[WeightedSource, ...]:
    if split == "validation" and wanted.cuts_validation:
        return wanted.train
    return {"train": wanted.train, "validation": wanted.validation, "test": wanted.test}[split]


def _read(wanted: Preparation, weighted: WeightedSource, split: Split) -> Iterator[HeldOutRow]:
    rows = iter(weighted.source.read())
    peeked = list(islice(rows, PEEKED_ROWS))
    reader = make_source_reader(wanted, weighted.source, peeked)
    maker = DocumentMaker(reader=reader, template=wanted.template, trains_all=False)
    for row in chain(peeked, rows):
        if isinstance(row, BadRow):
            continue
        document = maker.make(row)
        if isinstance(document, BadRow):
            continue
        if split == "validation" and wanted.cuts_validation and not is_cut_for_validation(document.prompt_hash):
            continue
        prompt, answers = document.segments[0], document.segments[1:]
        if prompt.is_trained or not answers:
            continue
        content = reader.read(row)
        assert not isinstance(content, BadRow)
        conversation = content if isinstance(content, Conversation) else _parse(content.text)
        instruction, context = find_question(conversation, prompt.text)
        answer = answers[0].text.removesuffix(wanted.template.end_token).strip()
        key = hashlib.blake2b(f"{prompt.text}\0{answer}".encode(), digest_size=12).hexdigest()
        yield HeldOutRow(key=key, prompt=prompt.text, instruction=instruction, context=context, answer=answer)


def _parse(text: str) -> Conversation | None:
    dialect = find_dialect(text)
    return None if dialect is None else parse_conversation(text, dialect)


def find_question(conversation: Conversation | None, prompt: str) -> tuple[str, str]:
    """Of the user's last words before the first answer; the whole prompt where nobody can tell."""
    for message, following in pairwise(conversation.messages if conversation is not None else ()):
        if message.role == "user" and following.role == "assistant":
            return message.content, message.context
    return prompt, ""
