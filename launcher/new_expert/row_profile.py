"""Read a dataset file and profile its fields: which there are, and what kind of values they hold."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from launcher.core.errors import InputError, Problem
from launcher.core.installation import find_page
from launcher.core.units import MIB
from launcher.corpus.conversations import is_chat, looks_like_chat
from launcher.corpus.file_hints import hint_encoding
from launcher.corpus.row_text import is_encodable, is_missing
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.sources import (
    NOT_UTF8,
    TOO_DEEP,
    FileSource,
    Format,
    ManifestKeyHintError,
    make_file_source,
)

MAX_ROWS = 20_000  # enough for every share that is reported, and few enough to keep in memory
MAX_BYTES = 512 * MIB  # for datasets with very long rows
MAX_BAD_SHARE = 0.5  # as in `launcher prepare`: with more bad rows than this, the file is read the wrong way
_SHOWN_NAMES = 5
_SHOWN_PROBLEMS = 5
_FORMATS = ", ".join(get_args(Format))
_EXPECTED: dict[Format, str] = {
    "jsonl": "expected one JSON object per line",
    "json": "expected a list of JSON objects",
    "csv": "expected a header, then one row per line with as many cells, separated by commas, semicolons or tabs",
    "parquet": "expected a table with at least one row",
}


@dataclass(kw_only=True, slots=True)
class FieldProfile:
    """Counts of the values of one field, by kind."""

    name: str
    num_text: int = 0  # not empty
    num_chats: int = 0  # lists of messages
    num_chat_texts: int = 0  # of num_text: lists of messages as text
    num_values: int = 0  # other lists, objects, numbers and booleans, which are written as JSON
    num_others: int = 0  # bytes and dates of Parquet, which cannot be trained on

    @property
    def num_filled(self) -> int:
        """Number of rows in which the field holds a value that can be trained on."""
        return self.num_text + self.num_chats + self.num_values

    @property
    def kind(self) -> str:
        """Most frequent kind of value, as shown in messages."""
        counts = {
            "text": self.num_text,
            "chat messages": self.num_chats,
            "JSON": self.num_values,
            "bytes or dates": self.num_others,
        }
        return max(counts, key=lambda kind: counts[kind])

    def add(self, value: Any) -> None:
        """Count a value of this field by its kind."""
        if is_missing(value):
            return
        if isinstance(value, str):
            self.num_text += bool(value.strip())
            self.num_chat_texts += looks_like_chat(value)
        elif is_chat(value):
            self.num_chats += 1
        elif isinstance(value, dict | list | int | float | Decimal):
            self.num_values += 1
        else:
            self.num_others += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProfile:
    """Rows of one file, with a profile of each field."""

    source: FileSource
    rows: tuple[Row, ...]
    bad_rows: tuple[BadRow, ...]
    fields: dict[str, FieldProfile]  # in the order in which rows have them
    is_complete: bool  # False: the file has more rows than were read
    notes: tuple[str, ...] = ()  # what of the file is ignored or ambiguous

    def format_share(self, count: int) -> str:
        """Format "count of N rows"."""
        return f"{count:,} of {'' if self.is_complete else 'the first '}{len(self.rows):,} rows"


def profile_file(path: Path, data_format: str | None = None) -> RowProfile:
    """Read up to MAX_ROWS rows of a file and profile their fields. Raises InputError if most cannot be read."""
    source = _open_source(path, data_format)
    rows: list[Row] = []
    bad: list[BadRow] = []
    num_bytes, is_complete = 0, True
    repeated: Counter[str] = Counter()
    for row in source.read(repeated):
        if len(rows) + len(bad) >= MAX_ROWS or num_bytes > MAX_BYTES:
            is_complete = False
            break
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            num_bytes += sum(len(value) for value in row.fields.values() if isinstance(value, str))
            rows.append(row)
    _check_rows(source, rows, bad)
    unencodable = tuple(dict.fromkeys(name for row in rows for name in row.fields if not is_encodable(name)))
    return RowProfile(
        source=source,
        rows=tuple(rows),
        bad_rows=tuple(bad),
        fields=profile_fields(rows),
        is_complete=is_complete,
        notes=tuple(_note_names(repeated, unencodable)),
    )


def profile_fields(rows: Iterable[Row]) -> dict[str, FieldProfile]:
    """Profile every field whose name can be written into a manifest."""
    fields: dict[str, FieldProfile] = {}
    for row in rows:
        for name, value in row.fields.items():
            if name in fields or is_encodable(name):
                fields.setdefault(name, FieldProfile(name=name)).add(value)
    return fields


def sample_evenly(rows: Sequence[Row], limit: int) -> tuple[Row, ...]:
    """Take at most `limit` rows, evenly spaced, because files are often sorted."""
    if len(rows) <= limit:
        return tuple(rows)
    return tuple(rows[position * len(rows) // limit] for position in range(limit))


def _open_source(path: Path, data_format: str | None) -> FileSource:
    """Open a file as training does; hints name flags, because there is no manifest yet."""
    if str(path) == "-" or path.parts[:2] == ("/", "dev"):
        raise InputError(f"{path}: not a regular file", hint="rows are read more than once: save them to a file first")
    try:
        source = make_file_source(path, data_format or _guess_format(path))
    except ManifestKeyHintError as error:
        hint = f"--data, --validation and --test name files; --format names their format: {_FORMATS}"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix and not path.exists():
            hint = (
                "a dataset of the Hugging Face Hub has no file here: write the manifest by hand, with "
                f'training.dataset.path "{path}" and format "huggingface" ({find_page("DATA.md")}), '
                "or download its rows first"
            )
        raise InputError(error.title, hint=hint) from None
    if source.format == "csv":
        _check_separator(path)
    return source


def _guess_format(path: Path) -> Format | None:
    """Return `jsonl` for JSON Lines in a file named .json, .txt, .data or without a suffix; otherwise None."""
    suffix = path.suffix.lower()
    try:
        if suffix not in (".json", ".txt", ".data", "") or not path.is_file():
            return None
        with path.open("rb") as file:
            lines = [line.strip() for line in islice(file, 20) if line.strip()]
    except OSError:
        return None  # reported when the file is read
    is_jsonl = bool(lines) and all(map(_is_json_object, lines[:2])) and (suffix != ".json" or len(lines) > 1)
    return "jsonl" if is_jsonl else None


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _check_separator(path: Path) -> None:
    """Raise InputError if the header of a CSV file is separated by '|', which is not supported."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return  # reported when the file is read
    if len(names) == 1 and "|" in names[0]:
        raise InputError(
            f"{path}: cells are separated by '|': the header is {names[0]!r}",
            hint="save it with commas, semicolons or tabs between the cells, or as one JSON object per line (.jsonl)",
        )


def _describe_empty(source: FileSource) -> str:
    return "; its only line is the header" if source.format == "csv" and source.path.stat().st_size else ""


def _check_rows(source: FileSource, rows: Sequence[Row], bad: Sequence[BadRow]) -> None:
    path, expected = source.path, _EXPECTED[source.format]
    if not rows and not bad:
        raise InputError(f"{path} has no rows" + _describe_empty(source), hint=expected)
    if len(bad) > MAX_BAD_SHARE * (len(rows) + len(bad)):
        problems = tuple(Problem(where=f"line {row.number}", what=row.reason) for row in bad[:_SHOWN_PROBLEMS])
        if len(bad) > len(problems):
            problems += (Problem(where="", what=f"and {len(bad) - len(problems):,} more"),)
        count = "no row can" if not rows else f"{len(bad):,} of {len(rows) + len(bad):,} rows cannot"
        raise InputError(f"{path}: {count} be read", problems, _make_hint(source, bad))
    if not any(row.fields for row in rows):
        raise InputError(f"{path}: the rows have no fields", hint=expected)


def _make_hint(source: FileSource, bad: Sequence[BadRow]) -> str:
    with source.path.open("rb") as file:
        head = file.read(4096)
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"PAR1")):
        return "the file is compressed, a spreadsheet or Parquet: unpack it, save it as CSV, or give --format parquet"
    if source.format != "parquet" and (b"\0" in head or any(row.reason == NOT_UTF8 for row in bad)):
        return hint_encoding(source.path)
    if all(row.reason == TOO_DEEP for row in bad):
        return "flatten the rows: they should contain little besides text"
    return f"{_EXPECTED[source.format]}; if the file name is misleading, --format names the format: {_FORMATS}"


def _note_names(repeated: Counter[str], unencodable: Sequence[str]) -> Iterable[str]:
    for name, count in repeated.most_common(_SHOWN_NAMES):
        yield f"the key {name!r} occurs twice in {count:,} objects: only its last value is read"
    if unencodable:
        shown = ", ".join(map(ascii, unencodable[:_SHOWN_NAMES]))
        yield f"ignored: {shown}, because the name contains a lone surrogate"
