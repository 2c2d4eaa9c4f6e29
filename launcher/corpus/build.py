"""Rows of every split -> packs and audit, in a scratch folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import numpy as np

from launcher.corpus.audit import Audit, Hashes, SplitAudit, make_notes, make_sample, make_split_audit
from launcher.corpus.conversations import RowReader, find_task_field, make_row_reader
from launcher.corpus.documents import Document, DocumentMaker
from launcher.corpus.pack import Packing, pack_singly, pack_tightest
from launcher.corpus.packs import write_packs
from launcher.corpus.preparation import Preparation, WeightedSource
from launcher.corpus.rows import BadRow, Rejections, Row
from launcher.corpus.sources import Source
from launcher.corpus.spool import Spool
from launcher.corpus.store import AUDIT_FILE
from launcher.corpus.tokenise import TokenBatch, tokenise
from launcher.errors import InputError, Problem
from launcher.paths import write_text_atomically

# Cut from the training rows where no validation file is given: what the published trainer cut.
_VALIDATION_SHARE = 0.1
PEEKED_ROWS = 200
_MOST_PEEKED_ROWS = 20_000  # until a field that the manifest names is met: a context may be rare
# Half of the rows unusable is no data set with flaws, it is a mistake in how it is read.
_MOST_BAD_ROWS = 0.5

Advance = Callable[[int], None]


@dataclass(slots=True)
class _Reading:
    """One split while it is read."""

    spool: Spool
    rejections: Rejections = field(default_factory=Rejections)
    num_rows: int = 0


def build_splits(wanted: Preparation, scratch: Path, advance: Advance) -> None:
    splits: dict[str, SplitAudit] = {}
    sample: Document | None = None
    known: Hashes | None = None
    for name, sources in (("train", wanted.train), ("validation", wanted.validation), ("test", wanted.test)):
        if not sources:
            continue
        made, first, prompts = _make_split(wanted, scratch, name, sources, advance, known)
        splits |= made
        sample = sample or first
        known = prompts if name == "train" else known
    audit = Audit(
        template=wanted.template.name,
        loss_on="all" if wanted.trains_all else "completion",
        is_packed=wanted.is_packed,
        splits=splits,
        sample=make_sample(sample),
        notes=(*wanted.notes, *make_notes(splits)),
    )
    write_text_atomically(scratch / AUDIT_FILE, audit.model_dump_json(indent=2) + "\n")


def _make_split(
    wanted: Preparation,
    scratch: Path,
    name: str,
    sources: Sequence[WeightedSource],
    advance: Advance,
    known: Hashes | None,
) -> tuple[dict[str, SplitAudit], Document | None, Hashes]:
    """The split itself, and the validation part that is cut from it where none is given; and its prompts.

    `known`: those of the training documents.
    """
    end = wanted.tokenizer.backend.token_to_id(wanted.template.end_token)
    assert end is not None, "make_template checks that"
    names = (name, "validation") if name == "train" and wanted.cuts_validation else (name,)
    with ExitStack() as stack:
        readings = {part: _Reading(stack.enter_context(Spool(scratch, part, end))) for part in names}
        first = _fill(wanted, readings, sources, advance)
        audits = {part: _finish(wanted, scratch, part, reading, known) for part, reading in readings.items()}
        prompts = readings[name].spool.prompt_hashes
    _check_split(name, audits, sources)
    return audits, first, prompts


def _fill(
    wanted: Preparation, readings: dict[str, _Reading], sources: Sequence[WeightedSource], advance: Advance
) -> Document | None:
    first: Document | None = None
    main, *held_out = readings.values()
    for weighted in sources:
        documents = _read_documents(wanted, weighted, main)
        head = list(islice(documents, 1))
        first = first or next(iter(head), None)
        for batch in tokenise(chain(head, documents), wanted.tokenizer.backend, wanted.capacity):
            if held_out:
                _divide(batch, main, held_out[0])
            else:
                main.spool.add(batch)
            advance(len(batch.rows))
    return first


def is_cut_for_validation(prompt_hash: int) -> bool:
    return prompt_hash < _VALIDATION_SHARE * 2**64


def _divide(batch: TokenBatch, main: _Reading, held_out: _Reading) -> None:
    """By the hash of the prompt alone: whatever the order of the rows, one prompt is never in both parts."""
    is_held_out = batch.prompt_hashes < np.uint64(_VALIDATION_SHARE * 2**64)
    count = int(is_held_out.sum())
    main.num_rows -= count
    held_out.num_rows += count
    main.spool.add(batch.select(~is_held_out))
    held_out.spool.add(batch.select(is_held_out))


def _read_documents(wanted: Preparation, weighted: WeightedSource, main: _Reading) -> Iterator[Document]:
    rows = iter(weighted.source.read())
    peeked = _peek(rows, {name for name in wanted.data.field_mapping.model_dump().values() if isinstance(name, str)})
    maker = DocumentMaker(
        reader=make_source_reader(wanted, weighted.source, peeked),
        template=wanted.template,
        trains_all=wanted.trains_all,
    )
    for row in chain(peeked, rows):
        main.num_rows += 1
        document = row if isinstance(row, BadRow) else maker.make(row)
        if isinstance(document, BadRow):
            main.rejections.add(document)
        elif weighted.weight >= 1 or document.prompt_hash % 2**32 < weighted.weight * 2**32:
            yield document  # by the low bits: the high ones cut the validation part


def _peek(rows: Iterator[Row | BadRow], named: set[str]) -> list[Row | BadRow]:
    peeked = list(islice(rows, PEEKED_ROWS))
    missing = named - _list_fields(peeked)
    while missing and len(peeked) < _MOST_PEEKED_ROWS:
        more = list(islice(rows, PEEKED_ROWS))
        if not more:
            break
        missing -= _list_fields(more)
        peeked += more
    return peeked


def _list_fields(rows: Sequence[Row | BadRow]) -> set[str]:
    return {name for row in rows if isinstance(row, Row) for name in row.fields}


def make_source_reader(wanted: Preparation, source: Source, peeked: Sequence[Row | BadRow]) -> RowReader:
    rows = [row for row in peeked if isinstance(row, Row)]
    fields = list(dict.fromkeys(name for row in rows for name in row.fields))
    if not fields:
        problems = tuple(
            Problem(where=f"line {row.number}", what=row.reason) for row in peeked[:10] if isinstance(row, BadRow)
        )
        raise InputError(
            f"{source.name}: no usable row" + ("" if problems else ": it is empty"),
            problems,
            hint="one JSON object a line",
        )
    return make_row_reader(wanted.data.field_mapping, fields, find_task_field(rows), source.name)


def _finish(wanted: Preparation, scratch: Path, name: str, reading: _Reading, known: Hashes | None) -> SplitAudit:
    spool = reading.spool
    lengths = spool.lengths
    packing: Packing = (
        pack_tightest(lengths, wanted.capacity, wanted.seed) if wanted.is_packed else pack_singly(lengths)
    )
    write_packs(scratch / f"{name}.arrow", spool, packing)
    spool.remove()
    return make_split_audit(reading.num_rows, reading.rejections, spool, packing, wanted.capacity, known)


def _check_split(name: str, audits: Mapping[str, SplitAudit], sources: Sequence[WeightedSource]) -> None:
    """A run never trains on a silently emptied set."""
    audit, num_rows = audits[name], sum(part.num_rows for part in audits.values())
    where = ", ".join(weighted.source.name for weighted in sources)
    rejected = sum(audit.rejected.values())
    problems = tuple(
        Problem(
            where=f"{count:,} rows", what=f"{reason} (lines {', '.join(map(str, audit.rejected_places[reason][:5]))})"
        )
        for reason, count in sorted(audit.rejected.items(), key=lambda item: -item[1])
    )
    if audit.num_untrained:
        what = "nothing in them would be trained (the answer is beyond max_seq_length, or empty)"
        problems += (Problem(where=f"{audit.num_untrained:,} rows", what=what),)
    if audit.num_documents == 0:
        raise InputError(
            f"{where}: no row of the {name} split can be trained on", problems, hint="`launcher prepare` shows a row"
        )
    if rejected > _MOST_BAD_ROWS * num_rows:
        raise InputError(
            f"{where}: {rejected:,} of {num_rows:,} rows cannot be used",
            problems,
            hint="check training.dataset.field_mapping and prompt_template; more than half is taken for a mistake",
        )
