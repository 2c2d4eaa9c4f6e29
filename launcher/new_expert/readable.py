"""Is a file a table of rows? What it is instead is told by its looks, with the way out."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import get_args

from launcher.corpus.rows import BadRow, Row
from launcher.corpus.sources import TOO_DEEP, FileSource, Format, hint_encoding, make_file_source
from launcher.errors import InputError, Problem

_MOST_BAD_ROWS = 0.5  # as in preparing: more is a mistake in how the file is read
_SHOWN_PROBLEMS = 5
_FORMATS = ", ".join(get_args(Format))
_WANTED: dict[Format, str] = {
    "jsonl": "one JSON object a line is what is wanted",
    "json": "a list of JSON objects is what is wanted",
    "csv": "a header is what is wanted, and below it a row a line with as many cells, separated by commas",
    "parquet": "a table with at least one row is what is wanted",
}
# By their first bytes: files that are called otherwise.
_MAGIC: dict[bytes, str] = {
    b"\x1f\x8b": "it is compressed: gunzip -c {file} > rows.jsonl",
    b"PK\x03\x04": "it is an archive or a spreadsheet: unpack it, or save it as CSV in UTF-8",
    b"PAR1": "it is Parquet: --format parquet",
}
_SENTENCE = re.compile(r"[?!.]\s*$|\n|^\s*[-+]?\d[\d.,]*\s*$")
_LONG_NAME = 60


def find_source(path: Path, wanted: str | None) -> FileSource:
    """The same as training's; the way out is a flag, as there is no manifest yet."""
    if str(path) == "-" or path.parts[:2] == ("/", "dev"):
        raise InputError(
            f"{path}: not a regular file", hint="rows are read more than once: save them to a file, and name that"
        )
    try:
        source = make_file_source(path, wanted or _sniff(path))
    except InputError as error:
        if "training.dataset" not in error.hint:
            raise
        hint = f"--data, --validation and --test name files, --format what they are: {_FORMATS}"
        raise InputError(error.title, hint=hint) from None
    if source.format == "csv":
        _check_separator(path)
    return source


def _sniff(path: Path) -> Format | None:
    """Much that is called .json has one object a line; names without a known ending are tried as that."""
    suffix = path.suffix.lower()
    try:
        if suffix not in (".json", ".txt", ".data", "") or not path.is_file():
            return None
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


def _check_separator(path: Path) -> None:
    """By the header, before rows with commas in them are taken for broken ones."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return  # told when it is read
    if len(names) == 1 and (mark := re.search(r"[;\t|]", names[0])):
        raise InputError(
            f"{path}: its cells are separated by {mark[0]!r}, not by commas: the header is {names[0]!r}",
            hint="save it with commas between the cells, or as one JSON object a line (.jsonl)",
        )


def check_readable(source: FileSource, rows: Sequence[Row], bad: Sequence[BadRow]) -> None:
    path, wanted = source.path, _WANTED[source.format]
    if not rows and not bad:
        raise InputError(f"{path} is empty: there are no rows in it", hint=wanted)
    if len(bad) > _MOST_BAD_ROWS * (len(rows) + len(bad)):
        problems = tuple(Problem(where=f"line {row.number}", what=row.reason) for row in bad[:_SHOWN_PROBLEMS])
        if len(bad) > len(problems):
            problems += (Problem(where="", what=f"and {len(bad) - len(problems):,} more"),)
        told = "no row can be read" if not rows else f"{len(bad):,} of {len(rows) + len(bad):,} rows cannot be read"
        raise InputError(f"{path}: {told}", problems, _hint(source, bad))
    if not any(row.fields for row in rows):
        raise InputError(f"{path}: the rows have no fields", hint=wanted)


def _hint(source: FileSource, bad: Sequence[BadRow]) -> str:
    path = source.path
    with path.open("rb") as file:
        head = file.read(4)
    for magic, told in _MAGIC.items():
        if head.startswith(magic):
            return told.format(file=shlex.quote(str(path)))
    if any(row.reason == "not UTF-8" for row in bad[:_SHOWN_PROBLEMS]):
        return hint_encoding(path)
    if all(row.reason == TOO_DEEP for row in bad):
        return "rows hold texts, and little else: flatten them"
    return f"{_WANTED[source.format]}; --format says what it is, where the name misleads: {_FORMATS}"


def note_header(source: FileSource, rows: Sequence[Row]) -> list[str]:
    """A CSV file's first line names the columns. Where it reads like a row, that row is lost."""
    names = list(rows[0].fields) if source.format == "csv" and rows else []
    odd = [name for name in names if len(name) > _LONG_NAME or _SENTENCE.search(name)]
    if not odd:
        return []
    shown = odd[0] if len(odd[0]) <= _LONG_NAME else odd[0][: _LONG_NAME - 3] + "..."
    return [f"the first line is taken for the columns' names, and reads like a row ({shown!r}): are names missing?"]
