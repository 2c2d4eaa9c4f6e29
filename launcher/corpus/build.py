"""Rows of every split -> packs and audit, in a scratch folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from launcher.corpus.audit import Audit, SplitAudit, make_notes, make_sample, make_split_audit
from launcher.corpus.conversations import RowReader, make_row_reader
from launcher.corpus.documents import Document, DocumentMaker
from launcher.corpus.pack import Packing, pack_best_fit, pack_singly
from launcher.corpus.packs import write_packs
from launcher.corpus.preparation import Preparation, WeightedSource
from launcher.corpus.rows import BadRow, Rejections, Row
from launcher.corpus.sources import Source
from launcher.corpus.spool import Spool
from launcher.corpus.store import AUDIT_FILE
from launcher.corpus.tokenise import tokenise
from launcher.errors import InputError, Problem
from launcher.paths import write_text_atomically

# Cut from the training rows where no validation file is given: what the published trainer cut.
_VALIDATION_SHARE = 0.1
_PEEKED_ROWS = 200
_CHUNK_DOCUMENTS = 16_384
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
    started = time.monotonic()
    splits: dict[str, SplitAudit] = {}
    sample: Document | None = None
    for name, sources in (("train", wanted.train), ("validation", wanted.validation), ("test", wanted.test)):
        if not sources:
            continue
        made, first = _make_split(wanted, scratch, name, sources, advance)
        splits |= made
        sample = sample or first
    audit = Audit(
        template=wanted.template.name,
        loss_on="all" if wanted.trains_all else "completion",
        is_packed=wanted.is_packed,
        splits=splits,
        sample=make_sample(sample),
        notes=make_notes(splits),
        seconds=time.monotonic() - started,
    )
    write_text_atomically(scratch / AUDIT_FILE, audit.model_dump_json(indent=2) + "\n")


def _make_split(
    wanted: Preparation, scratch: Path, name: str, sources: Sequence[WeightedSource], advance: Advance
) -> tuple[dict[str, SplitAudit], Document | None]:
    """The split itself, and the validation part that is cut from it where none is given."""
    end = wanted.tokenizer.backend.token_to_id(wanted.template.end_token)
    assert end is not None, "make_template checks that"
    names = (name, "validation") if name == "train" and wanted.cuts_validation else (name,)
    readings = {part: _Reading(Spool(scratch, part, end)) for part in names}
    first = _fill(wanted, readings, sources, advance)
    audits = {part: _finish(wanted, scratch, part, reading) for part, reading in readings.items()}
    _check_split(name, audits[name], sources)
    return audits, first


def _fill(
    wanted: Preparation, readings: dict[str, _Reading], sources: Sequence[WeightedSource], advance: Advance
) -> Document | None:
    first: Document | None = None
    main = next(iter(readings.values()))
    for weighted in sources:
        for part, documents in _by_part(wanted, readings, weighted, main):
            first = first or documents[0]
            for batch in tokenise(documents, wanted.tokenizer.backend, wanted.capacity):
                readings[part].spool.add(batch)
                advance(len(batch.rows))
    return first


def _by_part(
    wanted: Preparation, readings: dict[str, _Reading], weighted: WeightedSource, main: _Reading
) -> Iterator[tuple[str, list[Document]]]:
    """Documents of one source, in chunks, each with the split that they belong to."""
    documents = _read_documents(wanted, weighted, main)
    while chunk := list(islice(documents, _CHUNK_DOCUMENTS)):
        if len(readings) == 1:
            yield next(iter(readings)), chunk
            continue
        is_held_out = [document.prompt_hash < _VALIDATION_SHARE * 2**64 for document in chunk]
        for part, held_out in (("train", False), ("validation", True)):
            chosen = [document for document, held in zip(chunk, is_held_out, strict=True) if held is held_out]
            if chosen:
                readings[part].num_rows += len(chosen) if held_out else 0
                main.num_rows -= len(chosen) if held_out else 0
                yield part, chosen


def _read_documents(wanted: Preparation, weighted: WeightedSource, main: _Reading) -> Iterator[Document]:
    rows = iter(weighted.source.read())
    peeked = list(islice(rows, _PEEKED_ROWS))
    maker = DocumentMaker(
        reader=_make_reader(wanted, weighted.source, peeked), template=wanted.template, trains_all=wanted.trains_all
    )
    for row in chain(peeked, rows):
        main.num_rows += 1
        document = row if isinstance(row, BadRow) else maker.make(row)
        if isinstance(document, BadRow):
            main.rejections.add(document)
        elif weighted.weight >= 1 or document.prompt_hash >= (1 - weighted.weight) * 2**64:
            yield document


def _make_reader(wanted: Preparation, source: Source, peeked: Sequence[Row | BadRow]) -> RowReader:
    fields = list(dict.fromkeys(name for row in peeked if isinstance(row, Row) for name in row.fields))
    if not fields:
        problems = tuple(
            Problem(where=f"line {row.number}", what=row.reason) for row in peeked[:10] if isinstance(row, BadRow)
        )
        raise InputError(
            f"{source.name}: no usable row" + ("" if problems else ": it is empty"),
            problems,
            hint="one JSON object a line",
        )
    return make_row_reader(wanted.data.field_mapping, fields)


def _finish(wanted: Preparation, scratch: Path, name: str, reading: _Reading) -> SplitAudit:
    with reading.spool as spool:
        lengths = spool.lengths
        packing: Packing = (
            pack_best_fit(lengths, wanted.capacity, wanted.seed) if wanted.is_packed else pack_singly(lengths)
        )
        write_packs(scratch / f"{name}.arrow", spool, packing)
        audit = make_split_audit(reading.num_rows, reading.rejections, spool, packing, wanted.capacity)
    reading.spool.remove()
    return audit


def _check_split(name: str, audit: SplitAudit, sources: Sequence[WeightedSource]) -> None:
    """A run never trains on a silently emptied set."""
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
    if rejected > _MOST_BAD_ROWS * audit.num_rows:
        raise InputError(
            f"{where}: {rejected:,} of {audit.num_rows:,} rows cannot be used",
            problems,
            hint="check training.dataset.field_mapping and prompt_template; more than half is taken for a mistake",
        )
