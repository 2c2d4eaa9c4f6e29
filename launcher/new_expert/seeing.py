"""A first look at somebody's rows: which fields they have, and what stands in them. Nothing is guessed here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import get_args

from launcher.corpus.conversations import RowReader
from launcher.corpus.rows import BadRow, Json, Row
from launcher.corpus.sources import FileSource, Format, make_file_source
from launcher.errors import InputError, Problem
from launcher.units import MIB

MOST_ROWS = 20_000  # looked at: enough for every share that is told, and little enough to be held
MOST_BYTES = 512 * MIB  # of them, where rows are whole books
_MOST_DISTINCT = 1_000
_MOST_BAD_ROWS = 0.5  # as in preparing: more is a mistake in how the file is read
_SHOWN_PROBLEMS = 5
_FORMATS = ", ".join(get_args(Format))


@dataclass(kw_only=True, slots=True)
class FieldSeen:
    """What one field holds, counted over the rows that were looked at."""

    name: str
    num_text: int = 0  # not empty
    num_objects: int = 0
    num_lists: int = 0
    num_numbers: int = 0  # true and false are counted here, too
    num_chats: int = 0  # lists of messages with an answer among them
    object_keys: tuple[str, ...] = ()  # of the first object
    distinct: set[int] = field(default_factory=set)  # hashes of values; no more than a thousand are kept

    @property
    def num_filled(self) -> int:
        return self.num_text + self.num_objects + self.num_lists + self.num_numbers

    @property
    def kind(self) -> str:
        """What it mostly holds, in words."""
        counts = {
            "text": self.num_text,
            "chat messages": self.num_chats,
            "objects": self.num_objects,
            "lists": self.num_lists - self.num_chats,
            "numbers": self.num_numbers,
        }
        most = max(counts, key=lambda kind: counts[kind])
        return most if counts[most] else "nothing"

    def add(self, row: Row, value: Json) -> None:
        if value is None or value == "" or (isinstance(value, str) and not value.strip()):
            return
        if isinstance(value, str):
            self.num_text += 1
        elif isinstance(value, dict):
            self.num_objects += 1
            self.object_keys = self.object_keys or tuple(value)
        elif isinstance(value, list):
            self.num_lists += 1
            self.num_chats += _is_chat(row, self.name, value)
        elif isinstance(value, int | float):
            self.num_numbers += 1
        if len(self.distinct) < _MOST_DISTINCT:
            self.distinct.add(hash(value if isinstance(value, str) else json.dumps(value, default=str)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    source: FileSource
    rows: tuple[Row, ...]
    bad_rows: tuple[BadRow, ...]
    fields: dict[str, FieldSeen]  # in the order in which rows have them
    is_whole: bool  # False: there are more rows than were looked at

    @property
    def num_rows(self) -> int:
        """That were looked at, usable or not."""
        return len(self.rows) + len(self.bad_rows)

    def share(self, count: int) -> str:
        first = "" if self.is_whole else "the first "
        return f"{count:,} of {first}{len(self.rows):,} rows"


def see_rows(path: Path, wanted: str | None = None) -> Seen:
    """Refuses what is no table of rows, with the line that says so."""
    source = _find_source(path, wanted)
    rows: list[Row] = []
    bad: list[BadRow] = []
    held, is_whole = 0, True
    for row in source.read():
        if len(rows) + len(bad) >= MOST_ROWS or held > MOST_BYTES:
            is_whole = False
            break
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            held += sum(len(value) for value in row.fields.values() if isinstance(value, str))
            rows.append(row)
    _check_readable(path, rows, bad)
    return Seen(source=source, rows=tuple(rows), bad_rows=tuple(bad), fields=count_fields(rows), is_whole=is_whole)


def _find_source(path: Path, wanted: str | None) -> FileSource:
    """The same as training's; the way out is a flag, as there is no manifest yet."""
    try:
        return make_file_source(path, wanted or _sniff(path))
    except InputError as error:
        if "training.dataset" not in error.hint:
            raise
        raise InputError(error.title, hint=f"--data names your rows, --format what they are: {_FORMATS}") from None


def count_fields(rows: Iterable[Row]) -> dict[str, FieldSeen]:
    fields: dict[str, FieldSeen] = {}
    for row in rows:
        for name, value in row.fields.items():
            fields.setdefault(name, FieldSeen(name=name)).add(row, value)
    return fields


def spread(rows: Sequence[Row], most: int) -> tuple[Row, ...]:
    """At most so many, evenly over all of them: files are often sorted."""
    if len(rows) <= most:
        return tuple(rows)
    return tuple(rows[position * len(rows) // most] for position in range(most))


def _is_chat(row: Row, name: str, value: list[Json]) -> bool:
    """By the reader that training uses, where it looks like messages at all."""
    if not isinstance(value[0] if value else None, dict):
        return False
    return not isinstance(RowReader(messages=name).read(row), BadRow)


def _sniff(path: Path) -> Format | None:
    """Much that is called .json has one object a line; names without a known ending are tried as that."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".txt", ".data", "") or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            lines = [line.strip() for line in islice(file, 20) if line.strip()]
    except OSError:
        return None  # told when it is read
    is_lines = bool(lines) and all(_is_object(line) for line in lines[:2])
    if suffix == ".json":
        return "jsonl" if is_lines and len(lines) > 1 else None
    return "jsonl" if is_lines else None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _check_readable(path: Path, rows: Sequence[Row], bad: Sequence[BadRow]) -> None:
    if not rows and not bad:
        raise InputError(f"{path} is empty: there are no rows in it", hint="one JSON object a line is what is wanted")
    problems = tuple(Problem(where=f"line {row.number}", what=row.reason) for row in bad[:_SHOWN_PROBLEMS])
    if len(bad) > len(problems):
        problems += (Problem(where="", what=f"and {len(bad) - len(problems):,} more"),)
    hint = f"one JSON object a line is what is wanted; --format says what it is, where the name misleads: {_FORMATS}"
    if len(bad) > _MOST_BAD_ROWS * (len(rows) + len(bad)):
        told = "no row can be read" if not rows else f"{len(bad):,} of {len(rows) + len(bad):,} rows cannot be read"
        raise InputError(f"{path}: {told}", problems, hint)
    if not any(row.fields for row in rows):
        raise InputError(f"{path}: the rows have no fields", hint=hint)
    names = list(rows[0].fields)
    if path.suffix.lower() == ".csv" and len(names) == 1 and (mark := re.search(r"[;\t|]", names[0])):
        raise InputError(f"{path}: its cells are separated by {mark[0]!r}", hint="save it with commas between them")
