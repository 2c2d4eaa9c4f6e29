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
    """State of one split while its rows are read."""

    spool: TokenSpool
    rejections: Rejections = field(default_factory=Rejections)
    num_rows: int = 0
    systems: set[str] = field(default_factory=set)  # the different system messages, at most two


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """The part of the training rows that becomes the validation split."""

    cut: ValidationCut
    state: _SplitState


def build_splits(spec: PreparationSpec, scratch: Path, advance: Advance) -> None:
    """Build all splits of a dataset and write the audit."""
    audits: dict[str, SplitAudit] = {}
    sample: Document | None = None
    train_hashes: Hashes | None = None
    cut = read_validation_cut(spec) if spec.cuts_validation else None
    for name, sources in spec.sources.items():
        if not sources:
            continue
        with ExitStack() as stack:
            state = _SplitState(stack.enter_context(_open_spool(spec, scratch, name)))
            held_out = None
            if cut is not None and name == "train":
                held_out = _HeldOut(cut, _SplitState(stack.enter_context(_open_spool(spec, scratch, "validation"))))
            first = _read_sources(spec, sources, state, held_out, advance)
            built: dict[str, SplitAudit] = {name: _write_split(spec, scratch, name, state, train_hashes)}
            if held_out is not None:
                built["validation"] = _write_split(spec, scratch, "validation", held_out.state, train_hashes)
        _check_split(name, built, sources)
        audits |= built
        sample = sample or first
        if name == "train":
            train_hashes = state.spool.prompt_hashes
    audit = Audit(
        template=spec.template.name,
        loss_on="all" if spec.trains_all else "completion",
        is_packed=spec.is_packed,
        splits=audits,
        sample=make_sample(sample, spec.template),
        notes=(*spec.notes, *(_note_frequent_prompts(cut) if cut is not None else ()), *make_notes(audits)),
    )
    write_text_atomically(scratch / AUDIT_FILE, audit.model_dump_json(indent=2) + "\n")


def _open_spool(spec: PreparationSpec, scratch: Path, name: str) -> TokenSpool:
    end_token_id = spec.tokenizer.backend.token_to_id(spec.template.end_token)
    assert end_token_id is not None, "checked by make_template"
    return TokenSpool(scratch, name, end_token_id)


def _read_sources(
    spec: PreparationSpec,
    sources: Sequence[WeightedSource],
    state: _SplitState,
    held_out: _HeldOut | None,
    advance: Advance,
) -> Document | None:
    """Tokenize the rows of a split's sources into its spool; return the first document."""
    first: Document | None = None
    encoder = TextEncoder(spec.tokenizer, spec.template)
    for weighted in sources:
        num_workers = count_workers() if _is_large(weighted.source) else 1
        reader = _DocumentReader(spec, weighted)
        for chunk in reader.tokenize(encoder) if num_workers == 1 else reader.tokenize_in(num_workers, encoder):
            state.num_rows += chunk.num_rows
            for row in chunk.rejected:
                state.rejections.add(row)
            first = first or chunk.first
            if len(state.systems) < 2:
                state.systems |= chunk.systems
            for batch in chunk.batches:
                if held_out is None:
                    state.spool.add(batch)
                else:
                    _divide(batch, state, held_out)
            advance(chunk.num_rows)
    return first


def _is_large(source: Source) -> bool:
    """Return whether a source is a file that is large enough for several worker processes; Hub datasets use threads."""
    return isinstance(source, FileSource) and source.path.stat().st_size > _MIN_PARALLEL_BYTES


def _divide(batch: TokenBatch, state: _SplitState, held_out: _HeldOut) -> None:
    """Divide a batch between training and validation."""
    is_held_out = held_out.cut.select(batch.prompt_hashes)
    count = int(is_held_out.sum())
    state.num_rows -= count
    held_out.state.num_rows += count
    state.spool.add(batch.select(~is_held_out))
    held_out.state.spool.add(batch.select(is_held_out))


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
        self._builder, self._rows = spec.open_rows(weighted)
        self._weighted, self._capacity = weighted, spec.capacity

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
            document = row if isinstance(row, BadRow) else self._builder.make(row)
            if isinstance(document, BadRow):
                chunk.rejected.append(document)
            elif self._weighted.selects(document.prompt_hash):
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


def _write_split(
    spec: PreparationSpec, scratch: Path, name: str, state: _SplitState, train_hashes: Hashes | None
) -> SplitAudit:
    """Pack the documents of a split, write the packs, and return the split's statistics."""
    spool = state.spool
    lengths = spool.lengths
    packing: Packing = (
        pack_documents(lengths, spec.capacity, spec.seed) if spec.is_packed else pack_one_per_sequence(lengths)
    )
    write_packs(scratch / f"{name}.arrow", spool, packing)
    spool.remove()
    audit = make_split_audit(state.num_rows, state.rejections, spool, packing, spec.capacity, train_hashes)
    shared = next(iter(state.systems)) if len(state.systems) == 1 else ""
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
