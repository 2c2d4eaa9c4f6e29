"""Check the files of --validation and --test, and write sample/: short rows of every split for the smoke profile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

from launcher.base_models.catalogue import TINY_BASE_NAME
from launcher.core.errors import InputError, Problem
from launcher.corpus.conversations import find_task_field, make_row_reader
from launcher.corpus.documents import DocumentBuilder, make_template
from launcher.corpus.row_text import is_encodable
from launcher.corpus.rows import Row
from launcher.corpus.sources import FileSource, Format, format_by_name
from launcher.corpus.text_encoder import TextEncoder
from launcher.corpus.tokenizer import load_tokenizer
from launcher.corpus.validation_cut import choose_validation_cut
from launcher.manifest.suggest import find_closest
from launcher.new_expert.infer_roles import MAJORITY, list_reasons
from launcher.new_expert.proposal import Proposal, make_documents, note_bad_rows
from launcher.new_expert.row_profile import RowProfile, profile_file, sample_evenly
from launcher.plan.estimate.dataset_size import SAMPLE_TEST, SAMPLE_TRAIN, SAMPLE_VALIDATION
from launcher.plan.smoke import SMOKE_LENGTHS

SplitName = Literal["validation", "test"]

SAMPLE_FILES = (SAMPLE_TRAIN, SAMPLE_VALIDATION, SAMPLE_TEST)
_MAX_TRAIN_ROWS = 1000
_MAX_EVAL_ROWS = 200
_MEASURED_ROWS = 4000
# The sample's sequence length must hold this many rows, or this share of them if that is more.
_MIN_ROWS = 50
_MIN_SHARE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFile:
    """Usable rows of a file given by --validation or --test."""

    source: FileSource
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Contents of the files of sample/."""

    texts: Mapping[str, str]  # by file name
    note: str  # about rows that are too long; else empty


@dataclass(frozen=True, slots=True)
class _MeasuredRow:
    row: Row
    num_tokens: int  # of the tiny base
    prompt_hash: int


def load_splits(proposal: Proposal, data_format: str | None) -> dict[SplitName, SplitFile]:
    """Read the files of --validation and --test like the training rows; raises InputError if they do not match."""
    paths: dict[SplitName, Path | None] = {"validation": proposal.options.validation, "test": proposal.options.test}
    return {name: _load_split(name, path, proposal, data_format) for name, path in paths.items() if path is not None}


def _load_split(name: SplitName, path: Path, proposal: Proposal, data_format: str | None) -> SplitFile:
    profile = profile_file(path, data_format)
    _check_fields(name, profile, proposal)
    usable, rejections = make_documents(proposal.builder, profile.rows)
    if rejections.total > MAJORITY * len(profile.rows):
        raise InputError(
            f"{path}: {profile.format_share(rejections.total)} cannot be used",
            list_reasons(rejections),
            hint=f"--{name} is read like the training rows, with the same fields",
        )
    notes = [f"{path.name}: {note}" for note in (*profile.notes, *note_bad_rows(profile, rejections))]
    num_known = sum(document.prompt_hash in proposal.prompt_hashes for _, document in usable)
    if num_known:
        note = f"{path.name}: {num_known:,} of {len(usable):,} rows have a prompt that is also in the training rows"
        useless = "; this split cannot measure generalization" if num_known > MAJORITY * len(usable) else ""
        notes.append(note + useless)
    return SplitFile(source=profile.source, rows=tuple(row for row, _ in usable), notes=tuple(notes))


def _check_fields(name: SplitName, profile: RowProfile, proposal: Proposal) -> None:
    """Raise InputError if a split lacks a field that is read from the training rows: all files share one mapping."""
    path, train_path = profile.source.path, proposal.profile.source.path
    reader, fields = proposal.roles.reader, tuple(profile.fields)
    if reader.task is not None:
        if (
            find_task_field(profile.rows) is None
            or make_row_reader(proposal.roles.mapping, fields, task="input") != reader
        ):
            raise InputError(
                f"{path}: the rows do not have the layout of {train_path}",
                hint=f'each row needs {reader.answer!r} and "input", an object with the key "instruction"',
            )
        return
    problems = []
    for guess in proposal.roles.guesses:
        if guess.value in proposal.profile.fields and guess.name != "not used" and guess.value not in fields:
            suggestion = find_closest(guess.value, fields)
            what = f"rows have no field {guess.value!r}, which is the {guess.name} of the training rows"
            what += f"; did you mean {suggestion!r}?" if suggestion else ""
            problems.append(Problem(where=f"--{name}", what=what))
    if problems:
        raise InputError(
            f"{path} has different fields than {train_path}",
            tuple(problems),
            hint=f"rename the fields of {path}, which are {', '.join(fields)}; a field may be empty, but not missing",
        )


def choose_format(sources: Sequence[FileSource]) -> Format | None:
    """Return the file format that the manifest must name, or None if the file extensions show it."""
    if all(format_by_name(source.path) == source.format for source in sources):
        return None
    if len({source.format for source in sources}) > 1:
        raise InputError(
            "the files have different formats, which their names do not show",
            tuple(Problem(where=str(source.path), what=source.format) for source in sources),
            hint="name them .jsonl, .json, .csv or .parquet",
        )
    return sources[0].format


def make_sample(proposal: Proposal, splits: Mapping[SplitName, SplitFile]) -> Sample:
    """Choose rows for sample/ that fit the shortest sequence length of the smoke profile that holds enough rows."""
    rows = _measure(proposal, proposal.profile.rows)
    enough = min(len(rows), max(_MIN_ROWS, int(_MIN_SHARE * len(rows))))
    limit = next(
        (limit for limit in SMOKE_LENGTHS if sum(row.num_tokens <= limit for row in rows) >= enough), SMOKE_LENGTHS[-1]
    )
    parts = _split(proposal, rows, splits)
    for name, split in splits.items():
        parts[name] = _measure(proposal, split.rows)
    files = {"train": SAMPLE_TRAIN, "validation": SAMPLE_VALIDATION, "test": SAMPLE_TEST}
    texts = {
        file: _render(proposal, _choose(parts[name], limit, _MAX_TRAIN_ROWS if name == "train" else _MAX_EVAL_ROWS))
        for name, file in files.items()
        if parts.get(name)
    }
    num_long, note = sum(row.num_tokens > limit for row in rows), ""
    if not rows:
        note = "the smoke profile's template can write none of the rows, so there is no sample: use --profile full"
    elif num_long == len(rows):
        note = f"all rows are longer than the {limit:,} tokens of the smoke profile: its sample is truncated"
    elif num_long:
        note = f"{num_long:,} of {len(rows):,} rows are too long for the sample of the smoke profile"
    return Sample(texts=texts, note=note)


def _split(
    proposal: Proposal, rows: list[_MeasuredRow], splits: Mapping[SplitName, SplitFile]
) -> dict[str, list[_MeasuredRow]]:
    """Split by the hash of the prompt, as `launcher prepare` does: no prompt is in two splits."""
    if proposal.num_validation is None:
        return {"train": rows}
    parts: dict[str, list[_MeasuredRow]] = {"train": [], "validation": [], "test": []}
    test_cut = choose_validation_cut([_swap_halves(row.prompt_hash) for row in rows])
    for row in rows:
        if proposal.cut.holds_out(row.prompt_hash):
            name = "validation"
        else:
            name = "test" if test_cut.holds_out(_swap_halves(row.prompt_hash)) else "train"
        parts["train" if name in splits else name].append(row)
    return parts if parts["train"] else {"train": rows}


def _swap_halves(prompt_hash: int) -> int:
    """Return another hash of the same prompt: its low bits are as random as the high ones."""
    return (prompt_hash << 32 | prompt_hash >> 32) % 2**64


def _measure(proposal: Proposal, rows: Sequence[Row]) -> list[_MeasuredRow]:
    """Count the tokens of rows with tokenizer and template of the tiny base."""
    tokenizer = load_tokenizer(TINY_BASE_NAME, ())
    template = make_template("chatml", tokenizer)
    if proposal.options.chat_template is not None:  # rows with tools need it; not with this tokenizer's special tokens
        template = proposal.template.preview
    builder = DocumentBuilder(reader=proposal.roles.reader, template=template, trains_all=proposal.trains_all)
    usable, _ = make_documents(builder, sample_evenly(rows, _MEASURED_ROWS))
    encoder = TextEncoder(tokenizer, template)
    return [
        _MeasuredRow(row, sum(encoder.count_tokens(document.segments)), document.prompt_hash)
        for row, document in usable
    ]


def _choose(rows: list[_MeasuredRow], limit: int, max_rows: int) -> tuple[Row, ...]:
    """Return up to `max_rows` rows of at most `limit` tokens; if there are none, the shortest rows."""
    fitting = [row.row for row in rows if row.num_tokens <= limit]
    shortest = sorted(rows, key=lambda row: row.num_tokens)[:max_rows]
    return sample_evenly(fitting or [row.row for row in shortest], max_rows)


def _render(proposal: Proposal, rows: Sequence[Row]) -> str:
    """Return rows as JSON Lines with all fields, so that the mapping can be changed later; bytes become null."""
    lines = []
    for row in rows:
        fields = {name: row.fields.get(name) for name in proposal.profile.fields}
        fields = {name: None if isinstance(value, bytes) else value for name, value in fields.items()}
        line = json.dumps(fields, ensure_ascii=False, default=_format_other)
        lines.append(line if is_encodable(line) else json.dumps(fields, default=_format_other))
    return "".join(line + "\n" for line in lines)


def _format_other(value: object) -> str | float:
    return float(value) if isinstance(value, Decimal) else str(value)
