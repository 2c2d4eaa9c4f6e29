"""Build packs and the audit from the rows of every split, in a scratch folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.core.errors import InputError, Problem
from launcher.core.run_paths import write_text_atomically
from launcher.corpus.audit import Audit, Hashes, SplitAudit, make_notes, make_sample, make_split_audit
from launcher.corpus.bin_packing import Packing, pack_documents, pack_one_per_sequence
from launcher.corpus.documents import Document
from launcher.corpus.pack_file import write_packs
from launcher.corpus.rows import BadRow, Json, Rejections, Row
from launcher.corpus.sources import FileSource, Source
from launcher.corpus.spec import PreparationSpec, WeightedSource
from launcher.corpus.store import AUDIT_FILE
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.token_spool import TokenSpool
from launcher.corpus.tokenize_rows import TokenBatch, tokenize_documents, tokenize_here
from launcher.corpus.validation_cut import ValidationCut, read_validation_cut
from launcher.corpus.worker_processes import count_workers, map_in_processes

# More unusable rows than this are treated as a mistake in the manifest.
_MAX_BAD_SHARE = 0.5

_HINT_UNUSABLE = (
    "check training.dataset.field_mapping and base_models[0].prompt_template; "
    "`launcher new NAME --data FILE --dry-run` shows how a row is read"
)

_HINT_FEW = "add rows or a file for training.dataset.validation_path, or --set training.config.evaluation_strategy=no"

_HINT_LONG = (
    "max_seq_length truncates rows at the end, where their answers are: --set training.config.max_seq_length=... "
    "with more tokens, or shorten the prompts"
)

# Of the rows that one process takes at a time.
_CHUNK_ROWS = 512
_CHUNK_CHARACTERS = 4_000_000
# Rows of smaller files are tokenized before other processes are ready.
_MIN_PARALLEL_BYTES = 8_000_000

Advance = Callable[[int], None]


@dataclass(slots=True)
class _SplitState:
    """State of one split while it is read."""

    spool: TokenSpool
    rejections: Rejections = field(default_factory=Rejections)
    num_rows: int = 0
    systems: set[str] = field(default_factory=set)  # the different system messages, at most two


def build_splits(spec: PreparationSpec, scratch: Path, advance: Advance) -> None:
    """Build all splits of a dataset and write the audit."""
    splits: dict[str, SplitAudit] = {}
    sample: Document | None = None
    known: Hashes | None = None
    cut = read_validation_cut(spec) if spec.cuts_validation else None
    for name, sources in (("train", spec.train), ("validation", spec.validation), ("test", spec.test)):
        if not sources:
            continue
        made, first, prompts = _make_split(
            spec, scratch, name, sources, advance, known, cut if name == "train" else None
        )
        splits |= made
        sample = sample or first
        known = prompts if name == "train" else known
    audit = Audit(
        template=spec.template.name,
        loss_on="all" if spec.trains_all else "completion",
        is_packed=spec.is_packed,
        splits=splits,
        sample=make_sample(sample, spec.template),
        notes=(*spec.notes, *(_note_frequent_prompts(cut) if cut is not None else ()), *make_notes(splits)),
    )
    write_text_atomically(scratch / AUDIT_FILE, audit.model_dump_json(indent=2) + "\n")


def _make_split(
    spec: PreparationSpec,
    scratch: Path,
    name: str,
    sources: Sequence[WeightedSource],
    advance: Advance,
    known: Hashes | None,
    cut: ValidationCut | None,
) -> tuple[dict[str, SplitAudit], Document | None, Hashes]:
    """Build a split; with a `cut`, a part of the training rows becomes the validation split.

    Returns the statistics by split, the first document, and the prompt hashes of the documents. `known` are the prompt
    hashes of the training documents, if they were built before.
    """
    end = spec.tokenizer.backend.token_to_id(spec.template.end_token)
    assert end is not None, "checked by make_template"
    names = (name,) if cut is None else (name, "validation")
    with ExitStack() as stack:
        readings = {part: _SplitState(stack.enter_context(TokenSpool(scratch, part, end))) for part in names}
        first = _fill(spec, readings, sources, advance, cut)
        audits = {part: _finish(spec, scratch, part, reading, known) for part, reading in readings.items()}
        prompts = readings[name].spool.prompt_hashes
    _check_split(name, audits, sources)
    return audits, first, prompts


def _fill(
    spec: PreparationSpec,
    readings: dict[str, _SplitState],
    sources: Sequence[WeightedSource],
    advance: Advance,
    cut: ValidationCut | None,
) -> Document | None:
    first: Document | None = None
    encoder = TextEncoder(spec.tokenizer, spec.template)
    main, *held_out = readings.values()
    for weighted in sources:
        num_workers = count_workers() if _is_large(weighted.source) else 1
        documents = _DocumentReader(spec, weighted)
        tokenized = documents.tokenize(encoder) if num_workers == 1 else documents.tokenize_in(num_workers, encoder)
        for chunk in tokenized:
            main.num_rows += chunk.num_rows
            for row in chunk.rejected:
                main.rejections.add(row)
            first = first or chunk.first
            main.systems |= chunk.systems if len(main.systems) < 2 else set()
            for batch in chunk.batches:
                if cut is not None:
                    _divide(batch, cut, main, held_out[0])
                else:
                    main.spool.add(batch)
            advance(chunk.num_rows)
    return first


def _is_large(source: Source) -> bool:
    """Return whether a source is a file that is large enough for several worker processes; Hub datasets use threads."""
    return isinstance(source, FileSource) and source.path.stat().st_size > _MIN_PARALLEL_BYTES


def _divide(batch: TokenBatch, cut: ValidationCut, main: _SplitState, held_out: _SplitState) -> None:
    """Divide a batch between training and validation."""
    is_held_out = cut.select(batch.prompt_hashes)
    count = int(is_held_out.sum())
    main.num_rows -= count
    held_out.num_rows += count
    main.spool.add(batch.select(~is_held_out))
    held_out.spool.add(batch.select(is_held_out))


def _note_frequent_prompts(cut: ValidationCut) -> tuple[str, ...]:
    if not cut.trained:
        return ()
    stay = "a prompt of many rows stays" if len(cut.trained) == 1 else f"{len(cut.trained):,} prompts of many rows stay"
    return (f"validation: {stay} in the training split, so that at most a fifth of the rows are held out",)


@dataclass(slots=True)
class _Chunk:
    """Consecutive rows of a source: the tokenized ones, the rejected ones, and their number."""

    num_rows: int = 0
    rejected: list[BadRow] = field(default_factory=list)
    first: Document | None = None
    batches: Sequence[TokenBatch] = ()
    systems: set[str] = field(default_factory=set)  # the different system messages, at most two


class _DocumentReader:
    """Reads, renders and tokenizes the rows of a source."""

    def __init__(self, spec: PreparationSpec, weighted: WeightedSource) -> None:
        self._maker, self._rows = spec.open_rows(weighted)
        self._weight, self._capacity = weighted.weight, spec.capacity

    def tokenize(self, encoder: TextEncoder) -> Iterator[_Chunk]:
        """Yield tokenized rows; a thread tokenizes them while the next rows are rendered."""
        read = _Chunk()
        for batch in tokenize_documents(self._make(self._rows, read), encoder, self._capacity):
            chunk, read.num_rows, read.rejected = replace(read, batches=(batch,)), 0, []
            yield chunk
        yield read

    def tokenize_in(self, num_workers: int, encoder: TextEncoder) -> Iterator[_Chunk]:
        """Yield tokenized rows, which worker processes render and tokenize."""

        def work(rows: list[Row | BadRow]) -> _Chunk:
            chunk = _Chunk()
            chunk.batches = tokenize_here(self._make(rows, chunk), encoder, self._capacity)
            return chunk

        return map_in_processes(work, _cut_rows(self._rows), num_workers)

    def _make(self, rows: Iterable[Row | BadRow], chunk: _Chunk) -> Iterator[Document]:
        for row in rows:
            chunk.num_rows += 1
            document = row if isinstance(row, BadRow) else self._maker.make(row)
            if isinstance(document, BadRow):
                chunk.rejected.append(document)
            # By the low bits: the high ones select the validation split.
            elif self._weight >= 1 or document.prompt_hash % 2**32 < self._weight * 2**32:
                chunk.first = chunk.first or document
                if len(chunk.systems) < 2:
                    chunk.systems.add(document.system)
                yield document


def _cut_rows(rows: Iterable[Row | BadRow]) -> Iterator[list[Row | BadRow]]:
    chunk: list[Row | BadRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += 0 if isinstance(row, BadRow) else sum(map(_count_characters, row.fields.values()))
        if len(chunk) >= _CHUNK_ROWS or size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _count_characters(value: Json) -> int:
    if isinstance(value, str):
        return len(value)
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count_characters, children))


def _finish(spec: PreparationSpec, scratch: Path, name: str, reading: _SplitState, known: Hashes | None) -> SplitAudit:
    spool = reading.spool
    lengths = spool.lengths
    packing: Packing = (
        pack_documents(lengths, spec.capacity, spec.seed) if spec.is_packed else pack_one_per_sequence(lengths)
    )
    write_packs(scratch / f"{name}.arrow", spool, packing)
    spool.remove()
    audit = make_split_audit(reading.num_rows, reading.rejections, spool, packing, spec.capacity, known)
    shared = next(iter(reading.systems)) if len(reading.systems) == 1 else ""
    return audit.model_copy(update={"shared_system": shared})


def _check_split(name: str, audits: Mapping[str, SplitAudit], sources: Sequence[WeightedSource]) -> None:
    """Raise InputError if a split is empty or most of its rows are unusable."""
    audit, num_rows = audits[name], sum(part.num_rows for part in audits.values())
    where = ", ".join(weighted.source.location for weighted in sources)
    rejected = sum(audit.rejected.values())
    problems = tuple(
        Problem(
            where=f"{count:,} rows", what=f"{reason} (lines {', '.join(map(str, audit.rejected_places[reason][:5]))})"
        )
        for reason, count in sorted(audit.rejected.items(), key=lambda item: -item[1])
    )
    if audit.num_untrained:
        what = "they have no trained tokens (the answer is beyond max_seq_length, or empty)"
        problems += (Problem(where=f"{audit.num_untrained:,} rows", what=what),)
    held_out = num_rows - audit.num_rows
    if audit.num_documents == 0:
        hint = _HINT_LONG if audit.num_untrained > rejected else _HINT_UNUSABLE
        if held_out:
            problems += (Problem(where=f"{held_out:,} rows", what="they are held out for validation"),)
            hint = hint if rejected or audit.num_untrained else _HINT_FEW
        raise InputError(f"{where}: no row of the {name} split can be trained on", problems, hint=hint)
    if rejected > _MAX_BAD_SHARE * num_rows:
        raise InputError(
            f"{where}: {rejected:,} of {num_rows:,} rows cannot be used",
            problems,
            hint=f"more than half of the rows are unusable: {_HINT_UNUSABLE}",
        )
