"""Read a dataset file and profile its fields: which there are, and what kind of values they hold."""

from __future__ import annotations

import codecs
import csv
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import get_args

from launcher.core.errors import InputError, Problem
from launcher.core.units import MIB
from launcher.corpus.conversations import RowReader, get_role, is_chat
from launcher.corpus.rows import BadRow, Json, Rejections, Row
from launcher.corpus.sources import (
    TOO_DEEP,
    FileSource,
    Format,
    ManifestKeyHintError,
    hint_encoding,
    make_file_source,
)

MAX_ROWS = 20_000  # enough for every share that is reported, and few enough to keep in memory
MAX_BYTES = 512 * MIB  # for datasets with very long rows
MAX_BAD_SHARE = 0.5  # as in `launcher prepare`: with more bad rows than this, the file is read the wrong way
_MAX_DISTINCT = 1_000
_SHOWN_NAMES = 5
_SHOWN_PROBLEMS = 5
_FORMATS = ", ".join(get_args(Format))
_EXPECTED: dict[Format, str] = {
    "jsonl": "expected one JSON object per line",
    "json": "expected a list of JSON objects",
    "csv": "expected a header, then one row per line with as many cells, separated by commas",
    "parquet": "expected a table with at least one row",
}
# First bytes of files whose name says something else.
_MAGIC: dict[bytes, str] = {
    b"\x1f\x8b": "the file is compressed: gunzip -c {file} > rows.jsonl",
    b"PK\x03\x04": "the file is an archive or a spreadsheet: unpack it, or save it as CSV in UTF-8",
    b"PAR1": "the file is Parquet: --format parquet",
}
# A CSV column name that ends like a sentence, has several lines or is a number: probably a data row.
_NOT_A_NAME = re.compile(r"[?!.]\s*$|\n|^\s*[-+]?\d[\d.,]*\s*$")
_LONG_NAME = 60


@dataclass(kw_only=True, slots=True)
class FieldProfile:
    """Counts of the values of one field, by kind."""

    name: str
    num_text: int = 0  # not empty
    num_objects: int = 0
    num_lists: int = 0
    num_numbers: int = 0  # and booleans
    num_others: int = 0  # bytes and dates of Parquet, which cannot be trained on
    num_chats: int = 0  # lists of messages, readable or not
    num_answered: int = 0  # readable lists of messages with an answer
    num_asking: int = 0  # lists of messages that end before the assistant speaks
    num_answering: int = 0  # lists of messages that begin with the assistant
    unreadable: Rejections = field(default_factory=Rejections)  # why lists of messages cannot be read
    object_keys: tuple[str, ...] = ()  # keys of the first object
    distinct: set[int] = field(default_factory=set)  # hashes of at most a thousand values

    @property
    def num_filled(self) -> int:
        """Number of rows in which the field holds a value that can be trained on."""
        return self.num_text + self.num_objects + self.num_lists + self.num_numbers

    @property
    def kind(self) -> str:
        """Most frequent kind of value, as shown in messages."""
        counts = {
            "text": self.num_text,
            "chat messages": self.num_chats,
            "objects": self.num_objects,
            "lists": self.num_lists - self.num_chats,
            "numbers": self.num_numbers,
            "bytes or dates": self.num_others,
        }
        kind = max(counts, key=lambda kind: counts[kind])
        return kind if counts[kind] else "nothing"

    def add(self, row: Row, value: object) -> None:
        """Count one value."""
        if value is None or (isinstance(value, str) and not value.strip()):
            return
        if isinstance(value, str):
            self.num_text += 1
        elif isinstance(value, dict):
            self.num_objects += 1
            self.object_keys = self.object_keys or tuple(value)
        elif isinstance(value, list):
            self.num_lists += 1
            if is_chat(value):
                self._add_chat(row, value)
        elif isinstance(value, int | float):
            self.num_numbers += 1
        else:
            self.num_others += 1
        if len(self.distinct) < _MAX_DISTINCT:
            self.distinct.add(hash(value if isinstance(value, str) else json.dumps(value, default=str)))

    def _add_chat(self, row: Row, turns: Sequence[Json]) -> None:
        self.num_chats += 1
        self.num_asking += get_role(turns[-1]) in ("user", "tool")
        self.num_answering += get_role(turns[0]) == "assistant"
        content = RowReader(messages=self.name).read(row)  # the reader that training uses
        if isinstance(content, BadRow):
            self.unreadable.add(content)
        else:
            self.num_answered += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProfile:
    """Rows of one file, with a profile of each field."""

    source: FileSource
    rows: tuple[Row, ...]
    bad_rows: tuple[BadRow, ...]
    fields: dict[str, FieldProfile]  # in the order in which rows have them
    is_complete: bool  # False: the file has more rows than were read
    notes: tuple[str, ...] = ()  # what of the file is ignored or ambiguous
    unencodable_names: tuple[str, ...] = ()  # field names with a lone surrogate, which no manifest can contain

    def format_share(self, count: int) -> str:
        """Format "count of N rows"."""
        return f"{count:,} of {'' if self.is_complete else 'the first '}{len(self.rows):,} rows"


def profile_file(path: Path, data_format: str | None = None) -> RowProfile:
    """Read up to MAX_ROWS rows of a file and profile their fields. Raises if it is not a table of rows."""
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
        notes=tuple(_note_names(source, rows, repeated, unencodable)),
        unencodable_names=unencodable,
    )


def profile_fields(rows: Iterable[Row]) -> dict[str, FieldProfile]:
    """Profile every field whose name can be written into a manifest."""
    fields: dict[str, FieldProfile] = {}
    for row in rows:
        for name, value in row.fields.items():
            if name in fields or is_encodable(name):
                fields.setdefault(name, FieldProfile(name=name)).add(row, value)
    return fields


def is_encodable(text: str) -> bool:
    """Whether the text can be written as UTF-8; False if it has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
        raise InputError(error.title, hint=hint) from None
    if source.format == "csv":
        _check_separator(path)
    return source


def _guess_format(path: Path) -> Format | None:
    """Recognise JSON Lines in files that are named .json, .txt, .data or have no suffix."""
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
    """Check the header, before rows with commas in their text are reported as broken."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return  # reported when the file is read
    if len(names) == 1 and (mark := re.search(r"[;\t|]", names[0])):
        raise InputError(
            f"{path}: cells are separated by {mark[0]!r}, not by commas: the header is {names[0]!r}",
            hint="save it with commas between the cells, or as one JSON object per line (.jsonl)",
        )


def _check_rows(source: FileSource, rows: Sequence[Row], bad: Sequence[BadRow]) -> None:
    path, expected = source.path, _EXPECTED[source.format]
    if not rows and not bad:
        raise InputError(f"{path} is empty: it has no rows", hint=expected)
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
        head = file.read(4)
    for magic, hint in _MAGIC.items():
        if head.startswith(magic):
            return hint.format(file=shlex.quote(str(source.path)))
    if source.format != "parquet" and not _is_utf8(source.path):
        return hint_encoding(source.path)
    if all(row.reason == TOO_DEEP for row in bad):
        return "rows should hold little but text: flatten them"
    return f"{_EXPECTED[source.format]}; if the file name is misleading, --format names the format: {_FORMATS}"


def _is_utf8(path: Path) -> bool:
    """Whether the beginning of the file is UTF-8."""
    with path.open("rb") as file:
        try:
            codecs.getincrementaldecoder("utf-8")().decode(file.read(MIB))
        except UnicodeDecodeError:
            return False
    return True


def _note_names(
    source: FileSource, rows: Sequence[Row], repeated: Counter[str], unencodable: Sequence[str]
) -> Iterable[str]:
    for name, count in repeated.most_common(_SHOWN_NAMES):
        yield f"the key {name!r} occurs twice in {count:,} objects: only its last value is read"
    columns = rows[0].fields if source.format == "csv" and rows else ()
    suspicious = next((name for name in columns if len(name) > _LONG_NAME or _NOT_A_NAME.search(name)), None)
    if suspicious is not None:
        shown = suspicious if len(suspicious) <= _LONG_NAME else suspicious[: _LONG_NAME - 3] + "..."
        yield f"the first line is used as column names, but looks like a row ({shown!r}): is the header missing?"
    if unencodable:
        shown = ", ".join(map(ascii, unencodable[:_SHOWN_NAMES]))
        yield f"ignored: {shown}, because the name contains a lone surrogate"
