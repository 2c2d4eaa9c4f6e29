"""Files for validation and test: read as the training rows are, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.corpus.conversations import find_task_field, make_row_reader
from launcher.corpus.rows import Row
from launcher.corpus.sources import FileSource, Format, format_by_name
from launcher.errors import InputError, Problem
from launcher.manifest.spelling import closest
from launcher.new_expert.guesses import MOSTLY, list_reasons
from launcher.new_expert.proposal import Proposal, make_documents, note_bad
from launcher.new_expert.seeing import Seen, see_rows

Name = Literal["validation", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSplit:
    name: Name
    source: FileSource
    rows: tuple[Row, ...]  # that can be used
    prompt_hashes: tuple[int, ...]  # of each
    notes: tuple[str, ...]


def see_splits(proposal: Proposal, wanted: str | None) -> dict[Name, GivenSplit]:
    wishes = proposal.wishes
    named: dict[Name, Path | None] = {"validation": wishes.validation, "test": wishes.test}
    return {name: _see_split(name, path, proposal, wanted) for name, path in named.items() if path is not None}


def _see_split(name: Name, path: Path, proposal: Proposal, wanted: str | None) -> GivenSplit:
    seen = see_rows(path, wanted)
    _check_fields(name, seen, proposal)
    made, rejections = make_documents(proposal.maker, seen.rows)
    if rejections.total > MOSTLY * len(seen.rows):
        raise InputError(
            f"{path}: {seen.share(rejections.total)} cannot be used",
            list_reasons(rejections),
            hint=f"--{name} is read as the training rows are: with the same fields",
        )
    hashes = tuple(document.prompt_hash for _, document in made)
    notes = [f"{path.name}: {note}" for note in (*seen.notes, *note_bad(seen, rejections))]
    known = sum(prompt in proposal.prompt_hashes for prompt in hashes)
    if known:
        told = f"{path.name}: {known:,} of {len(hashes):,} rows ask what training rows ask, too"
        notes.append(told + ("; it cannot tell what was learnt" if known > MOSTLY * len(hashes) else ""))
    return GivenSplit(
        name=name, source=seen.source, rows=tuple(row for row, _ in made), prompt_hashes=hashes, notes=tuple(notes)
    )


def _check_fields(name: Name, seen: Seen, proposal: Proposal) -> None:
    """The same fields: a manifest has one mapping for all of its files."""
    reader, fields = proposal.roles.reader, tuple(seen.fields)
    if reader.task is not None:
        if find_task_field(seen.rows) is None or make_row_reader(proposal.roles.mapping, fields, "input") != reader:
            raise InputError(
                f"{seen.source.path}: the rows are of another form than those of {proposal.seen.source.path}",
                hint=f"they need input, an object with an instruction, and {reader.answer}",
            )
        return
    problems = []
    for guess in proposal.roles.guesses:
        if guess.value in proposal.seen.fields and guess.what != "not used" and guess.value not in fields:
            meant = closest(guess.value, fields)
            what = f"rows have no field {guess.value!r}, the {guess.what} of the training rows"
            problems.append(Problem(where=f"--{name}", what=what + (f"; did you mean {meant!r}?" if meant else "")))
    if problems:
        raise InputError(
            f"{seen.source.path}: its fields are not those of {proposal.seen.source.path}",
            tuple(problems),
            hint=f"rename them: rows have {', '.join(fields)}",
        )


def choose_format(sources: Sequence[FileSource]) -> Format | None:
    """What a manifest says of all its files. None: their names tell it."""
    if all(format_by_name(source.path) == source.format for source in sources):
        return None
    if len({source.format for source in sources}) > 1:
        raise InputError(
            "the files are of different formats, which not all of their names tell",
            tuple(Problem(where=str(source.path), what=source.format) for source in sources),
            hint="call them .jsonl, .json, .csv or .parquet, as they are",
        )
    return sources[0].format
