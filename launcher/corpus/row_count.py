"""Count the sequences per epoch for the plan, in prepared data or by an estimate from the first rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from launcher.base_models.catalogue import TINY_BASE_NAME
from launcher.core.errors import InputError
from launcher.corpus.bin_packing import Lengths, pack_documents
from launcher.corpus.documents import Document, DocumentBuilder
from launcher.corpus.first_rows import count_rows, is_too_large, make_source_reader, peek_rows
from launcher.corpus.hash_cache import is_hash_cached
from launcher.corpus.rows import BadRow
from launcher.corpus.sources import FileSource
from launcher.corpus.spec import PreparationSpec, WeightedSource, make_preparation_spec
from launcher.corpus.store import Store, find_stores, make_key
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenize_rows import tokenize_documents
from launcher.corpus.tokenizer import BaseTokenizer, find_tokenizer, load_tokenizer
from launcher.corpus.validation_cut import choose_validation_cut
from launcher.plan.estimate.dataset_size import BYTES_PER_TOKEN, RowEstimate
from launcher.plan.model import Plan

_MAX_ROWS = 600
_MAX_CHARACTERS = 300_000
_MAX_PACKED = 20_000  # documents whose packing is computed; more of them are packed alike
_MAX_HASHED_BYTES = 1 << 28  # a larger file is not read only to find prepared data
_MARKER = re.compile(r"<[^<>\s]{1,40}>")  # such as <|im_end|>: one token


def refine_estimate(rows: RowEstimate, plan: Plan, folder: Path, search: tuple[Path, ...]) -> RowEstimate:
    """Return the estimate with the number of sequences per epoch, from prepared data or the tokenized first rows.

    If the tokenizer is not on this machine, tokens are estimated from the bytes of the rendered rows. Nothing is
    downloaded or written. If rows cannot be read, the estimate stays unchanged; the preparation reports the error.
    """
    tokenizer = find_tokenizer(plan.base.name, search)
    if tokenizer is None and plan.random_weights:
        tokenizer = load_tokenizer(TINY_BASE_NAME, ())
    try:
        spec = _make_spec(plan, folder, tokenizer)
        if not all(isinstance(source.source, FileSource) for source in spec.train):
            return rows
        store = None if tokenizer is None else _find_prepared(spec)
        return _use_store(rows, store) if store is not None else _count_first_rows(rows, spec, tokenizer)
    except (InputError, OSError, ValueError):
        return rows


def _make_spec(plan: Plan, folder: Path, tokenizer: BaseTokenizer | None) -> PreparationSpec:
    if tokenizer is not None:
        return make_preparation_spec(plan, folder, tokenizer)
    tiny = load_tokenizer(TINY_BASE_NAME, ())  # renders only
    try:
        return make_preparation_spec(plan, folder, tiny)
    except InputError:  # it has not all tokens of the template
        data = plan.data.model_copy(update={"prompt_template": "chatml", "chat_template": None, "end_token": None})
        return make_preparation_spec(plan.model_copy(update={"data": data}), folder, tiny)


def _find_prepared(spec: PreparationSpec) -> Store | None:
    """Return the prepared data of a spec without verifying its files; None if there is none."""
    files = [s.source.path for s in chain.from_iterable(spec.sources.values()) if isinstance(s.source, FileSource)]
    stores = find_stores(spec.root)
    if not stores or any(f.stat().st_size > _MAX_HASHED_BYTES and not is_hash_cached(f, spec.root) for f in files):
        return None
    key = make_key(spec.key_parts(keeps_hashes=False))
    return next((store for store in stores if store.manifest.key == key), None)


def _use_store(rows: RowEstimate, store: Store) -> RowEstimate:
    splits = store.audit.splits
    train, validation = splits["train"], splits.get("validation")
    return replace(
        rows,
        num_rows=train.num_rows,
        mean_tokens=train.mean_length,
        num_sequences=train.num_packs,
        num_validation_rows=None if validation is None else validation.num_documents,
        trained_share=train.trained_share,
        count_basis=f"prepared data: {train.num_documents:,} rows",
        length_basis=f" of {train.mean_length:.0f} tokens",
        is_measured=True,
        is_length_assumed=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _SourceSample:
    """Documents of the first rows of a source, and the ratio of all rows of the source to these."""

    documents: Sequence[Document]
    num_rows: int
    num_bad: int
    factor: float


def _count_first_rows(rows: RowEstimate, spec: PreparationSpec, tokenizer: BaseTokenizer | None) -> RowEstimate:
    known = rows.num_rows if rows.is_measured and len(spec.train) == 1 else None
    samples = [_read_sample(spec, source, known) for source in spec.train]
    lengths, num_validation, num_trained = [np.zeros(0, dtype=np.int32)], 0.0, 0.0
    cut = choose_validation_cut([document.prompt_hash for sample in samples for document in sample.documents])
    for sample in samples:
        kept = [d for d in sample.documents if not (spec.cuts_validation and cut.holds_out(d.prompt_hash))]
        num_validation += (len(sample.documents) - len(kept)) * sample.factor
        counted, trained = _count_tokens(kept, spec, tokenizer)
        if len(counted):
            lengths.append(np.resize(counted, max(1, round(len(counted) * sample.factor))))
            num_trained += trained * sample.factor
    documents = np.concatenate(lengths)
    if not len(documents):
        return rows
    is_exact = all(sample.factor == 1 for sample in samples) and tokenizer is not None
    about = "" if is_exact else "about "
    num_rows = sum(sample.num_rows for sample in samples)
    mean = float(documents.mean())
    names = ", ".join(source.source.name for source in spec.train)
    counts = {
        "cannot be used": sum(sample.num_bad * sample.factor for sample in samples),
        "are truncated to max_seq_length": float((documents >= spec.capacity).sum()),
        "are held out for validation": num_validation if spec.cuts_validation else 0.0,
    }
    shares = "".join(f"; {about}{count:,.0f} of them {what}" for what, count in counts.items() if round(count))
    return replace(
        rows,
        num_rows=num_rows,
        mean_tokens=mean,
        num_sequences=_count_sequences(documents, spec),
        num_validation_rows=round(num_validation) if spec.cuts_validation else _count_validation_rows(spec),
        trained_share=min(1.0, num_trained / float(documents.sum())),
        count_basis=rows.count_basis if known else f"read from {names}: about {num_rows:,} rows",
        length_basis=f" of {about}{mean:.0f} tokens with the template{shares}",
        is_measured=True,
        is_length_assumed=False,
    )


def _read_sample(spec: PreparationSpec, weighted: WeightedSource, known: int | None) -> _SourceSample:
    source = weighted.source
    assert isinstance(source, FileSource)
    if is_too_large(source):
        raise InputError(f"{source.location}: too large")
    rows = weighted.read()
    peeked = peek_rows(rows, spec.data.field_mapping, _MAX_ROWS)
    num_rows = known or count_rows(source, peeked, rows, weighted.max_rows)[0]
    reader = make_source_reader(spec.data.field_mapping, spec.data.system_prompt, source, peeked)
    builder = DocumentBuilder(reader=reader, template=spec.template, trains_all=spec.trains_all)
    documents: list[Document] = []
    characters = num_read = num_bad = 0
    for row in islice(peeked, _MAX_ROWS):
        document = row if isinstance(row, BadRow) else builder.make(row)
        num_read += 1
        num_bad += isinstance(document, BadRow)
        if not isinstance(document, BadRow):
            characters += sum(len(segment.text) for segment in document.segments)
            if weighted.selects(document.prompt_hash):
                documents.append(document)
        if characters > _MAX_CHARACTERS:
            break
    factor = num_rows / max(1, num_read)
    return _SourceSample(documents=documents, num_rows=num_rows, num_bad=num_bad, factor=factor)


def _count_tokens(
    documents: Sequence[Document], spec: PreparationSpec, tokenizer: BaseTokenizer | None
) -> tuple[Lengths, float]:
    """Return the lengths of the truncated documents with trained tokens, and the total number of trained tokens."""
    if tokenizer is None:
        guessed = np.fromiter(map(guess_tokens, documents), dtype=np.int32)
        prompts = np.fromiter((guess_tokens(document, is_trained=False) for document in documents), dtype=np.int32)
        lengths = np.minimum(guessed, spec.capacity)
        return lengths, float(np.maximum(0, lengths - prompts).sum())
    counts, num_trained = [np.zeros(0, dtype=np.int32)], 0
    for batch in tokenize_documents(documents, TextEncoder(tokenizer, spec.template), spec.capacity):
        starts = np.cumsum(batch.lengths) - batch.lengths
        counts.append(batch.lengths[np.add.reduceat(batch.trained.astype(np.int64), starts) > 0])
        num_trained += int(batch.trained.sum())
    return np.concatenate(counts), float(num_trained)


def guess_tokens(document: Document, *, is_trained: bool | None = None) -> int:
    """Estimate the tokens of a document from its bytes, with one token per marker such as <|im_end|>.

    `is_trained` limits this to the text with loss (True) or without loss (False).
    """
    parts = (segment for segment in document.segments if is_trained in (None, segment.is_trained))
    text = "".join(segment.text for segment in parts)
    rest, markers = _MARKER.subn("", text)
    return max(1, markers + round(len(rest.encode(errors="replace")) / BYTES_PER_TOKEN))


def _count_sequences(lengths: Lengths, spec: PreparationSpec) -> int:
    if not spec.is_packed:
        return len(lengths)
    packed = lengths[:_MAX_PACKED] if len(lengths) <= _MAX_PACKED else np.resize(lengths, _MAX_PACKED)
    return max(1, round(pack_documents(packed, spec.capacity, spec.seed).num_packs * len(lengths) / len(packed)))


def _count_validation_rows(spec: PreparationSpec) -> int | None:
    """Return the number of rows in the validation files; None if there are no such files."""
    num_rows = 0
    for weighted in spec.validation:
        assert isinstance(weighted.source, FileSource)
        rows = weighted.read()
        num_rows += count_rows(weighted.source, peek_rows(rows, spec.data.field_mapping, _MAX_ROWS), rows)[0]
    return num_rows if spec.validation else None
