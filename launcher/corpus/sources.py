"""Read rows from files and hub datasets in bounded memory. A bad row is a value, not an exception."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from launcher.core.errors import InputError, first_line, hint_for
from launcher.corpus.conversations import TOOLS_FIELD
from launcher.corpus.file_hints import UTF16_BOMS, hint_encoding, hint_joining
from launcher.corpus.rows import BadRow, Json, Row, format_json_error
from launcher.manifest.parse_json import MAX_DEPTH, is_too_deep
from launcher.manifest.suggest import find_closest

Format = Literal["jsonl", "json", "csv", "parquet"]

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_UTF8_BOM = b"\xef\xbb\xbf"
NOT_UTF8 = "not UTF-8"
_CELLS = "a different number of cells than the header; text that contains the separator needs quotes"
_PROBED_LINES = 50  # of a CSV file, to find its separator
TOO_DEEP = f"nested too deeply (more than {MAX_DEPTH} levels)"
# Unsupported formats, and how to convert them.
_OTHER_SUFFIXES = {
    ".gz": "it is compressed: gunzip -k {file}",
    ".bz2": "it is compressed: bunzip2 -k {file}",
    ".xz": "it is compressed: unxz -k {file}",
    ".zst": "it is compressed: unzstd {file}",
    ".zip": "it is compressed: unzip {file}",
    ".xlsx": "it is a spreadsheet: save it as CSV in UTF-8",
    ".xls": "it is a spreadsheet: save it as CSV in UTF-8",
    ".ods": "it is a spreadsheet: save it as CSV in UTF-8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSource:
    """A local file with rows."""

    path: Path
    format: Format

    @property
    def name(self) -> str:
        """Name of the data source in messages."""
        return self.path.name

    @property
    def location(self) -> str:
        """Path for error messages."""
        return str(self.path)

    def read(self, repeated: Counter[str] | None = None) -> Iterator[Row | BadRow]:
        """Yield rows. If `repeated` is given, duplicate keys of JSON objects are counted in it, which is slower."""
        readers: dict[Format, Callable[[], Iterator[Row | BadRow]]] = {
            "jsonl": lambda: _read_jsonl(self.path, repeated),
            "json": lambda: _read_json(self.path, repeated),
            "csv": lambda: _read_csv(self.path),
            "parquet": lambda: _read_parquet(self.path),
        }
        try:
            yield from readers[self.format]()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror or error}", hint=hint_for(error)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """A dataset of the Hugging Face hub, from the cache on disk or over the network."""

    dataset: str
    config: str | None
    split: str
    revision: str | None
    streaming: bool = False  # rows are streamed and not stored on disk

    @property
    def name(self) -> str:
        """Name of the data source in messages."""
        return f"{self.dataset}:{self.split}"

    @property
    def location(self) -> str:
        """Name for error messages."""
        return self.name

    @property
    def fingerprint(self) -> str:
        """Fingerprint that `datasets` gives the data, or the commit on the Hub if rows are streamed."""
        if not self.streaming:
            return str(self.load()._fingerprint)
        from huggingface_hub import HfApi

        try:
            return f"{self.config}@{HfApi().dataset_info(self.dataset, revision=self.revision).sha}"
        except Exception as error:  # the hub's client raises whatever its network layer raises
            raise self._unreachable(error) from None

    def read(self) -> Iterator[Row | BadRow]:
        """Yield rows."""
        for number, fields in enumerate(self.load(), 1):
            yield Row(number=number, fields=_remove_padding(fields))

    def load(self) -> Any:
        """Load the dataset; raises InputError with local alternatives if it is not available."""
        import datasets

        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(
                self.dataset, self.config, split=self.split, revision=self.revision, streaming=self.streaming
            )
        except Exception as error:  # datasets raises whatever its network, file and script layers raise
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> InputError:
        return InputError(
            f"{self.dataset}: this dataset is neither in the cache nor available from the hub",
            hint="download it on a machine with network access (HF_HOME is the cache), or use a local "
            "file: --set training.dataset.path=rows.jsonl --set training.dataset.format=jsonl; "
            f"error of datasets: {first_line(error)}",
        )


Source = FileSource | HubSource


class ManifestKeyHintError(InputError):
    """InputError whose hint names manifest keys; callers that have no manifest yet replace the hint."""


def make_file_source(path: Path, format_name: str | None) -> FileSource:
    """Return a local file as a source; its format is given by the manifest or the file name."""
    try:
        if path.is_dir():
            inside = ", ".join(_data_files(path))
            advice = (
                f"choose a file in it: {inside}"
                if inside
                else f"it has no file with a suffix of {', '.join(_SUFFIXES)}"
            )
            raise InputError(f"{path} is a directory; {advice}", hint=hint_joining(path, _data_files(path)))
        if not path.exists():
            raise _missing(path)
        if not path.is_file():
            raise InputError(
                f"{path}: not a regular file", hint="rows are read more than once: save them to a regular file"
            )
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", hint=hint_for(error)) from None
    by_name = format_by_name(path) if format_name in (None, "huggingface") else None
    format_ = by_name or next((known for known in _SUFFIXES.values() if known == format_name), None)
    if format_ is None:
        known = ", ".join(sorted(set(_SUFFIXES.values())))
        title, other = f"{path}: unknown format", _OTHER_SUFFIXES.get(path.suffix.lower())
        if other is None:
            raise ManifestKeyHintError(title, hint=f"set training.dataset.format to one of {known}")
        raise InputError(title, hint=other.format(file=shlex.quote(str(path))))
    return FileSource(path=path, format=format_)


def make_task_source(path: Path, format_name: str) -> FileSource:
    """Return a file of a `multi_task` dataset as a source; its format is that of the file name, else `format_name`."""
    return make_file_source(path, None if format_by_name(path) else format_name)


def format_by_name(path: Path) -> Format | None:
    """Return the format by the suffix of a file name; None if it is unknown."""
    return _SUFFIXES.get(path.suffix.lower())


def _missing(path: Path) -> InputError:
    nearby = _data_files(path.parent)
    meant = find_closest(path.name, nearby)
    title = f"{path}: no such file"
    if any(sign in path.name for sign in "*?") and nearby:
        return InputError(title, hint=hint_joining(path.parent, nearby) or f"did you mean {path.parent / nearby[0]}?")
    if meant:
        return InputError(title, hint=f"did you mean {path.parent / meant}?")
    return ManifestKeyHintError(title, hint="training.dataset.path is relative to the manifest's folder")


def _data_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(file.name for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES and file.is_file())[:20]


def _read_jsonl(path: Path, repeated: Counter[str] | None) -> Iterator[Row | BadRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith((*UTF16_BOMS, b"{\0", b"\0{")):  # json.loads would accept most lines
                raise InputError(f"{path}: {NOT_UTF8}", hint=hint_encoding(path))
            raw = line.removeprefix(_UTF8_BOM) if number == 1 else line
            if raw.strip():
                yield _parse_line(raw, number, repeated)


def _parse_line(raw: bytes, number: int, repeated: Counter[str] | None) -> Row | BadRow:
    try:
        fields = _parse(raw, repeated)
    except UnicodeDecodeError:
        return BadRow(number=number, reason=NOT_UTF8)
    except RecursionError:
        return BadRow(number=number, reason=TOO_DEEP)
    except ValueError as error:
        return BadRow(number=number, reason=f"broken JSON: {format_json_error(error)}")
    return _make_row(fields, number, raw)


def _parse(raw: bytes, repeated: Counter[str] | None) -> Json:
    def count_repeated(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        tree = dict(pairs)
        if repeated is not None and len(tree) < len(pairs):
            repeated.update(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return tree

    tree: Json = json.loads(raw) if repeated is None else json.loads(raw, object_pairs_hook=count_repeated)
    return tree


def _make_row(fields: Json, number: int, raw: bytes = b"") -> Row | BadRow:
    if not isinstance(fields, dict):
        return BadRow(number=number, reason="not an object")
    # Only rows with nested values and many brackets are measured.
    if any(isinstance(value, dict | list) for value in fields.values()):
        may_be_deep = not raw or raw.count(b"[") + raw.count(b"{") > MAX_DEPTH
        if may_be_deep and is_too_deep(fields):
            return BadRow(number=number, reason=TOO_DEEP)
    return Row(number=number, fields=fields)


def _read_json(path: Path, repeated: Counter[str] | None) -> Iterator[Row | BadRow]:
    """Yield the rows of a JSON file with a list of objects; the file is read into memory completely."""
    try:
        rows = _parse(path.read_bytes().removeprefix(_UTF8_BOM), repeated)
    except UnicodeDecodeError:
        raise InputError(f"{path}: {NOT_UTF8}", hint=hint_encoding(path)) from None
    except RecursionError:
        raise InputError(f"{path}: {TOO_DEEP}", hint="flatten the rows") from None
    except ValueError as error:
        raise InputError(f"{path}: broken JSON: {error}", hint="one object per line needs the suffix .jsonl") from None
    if not isinstance(rows, list):
        raise InputError(
            f"{path}: not a list of rows",
            hint="use a JSON list such as [{...}, {...}], or a .jsonl file with one object per line",
        )
    for number, fields in enumerate(rows, 1):
        yield _make_row(fields, number)


def _read_csv(path: Path) -> Iterator[Row | BadRow]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", errors="strict", newline="") as file:
        reader = csv.reader(file, delimiter=find_delimiter(path), strict=True)
        line = 1  # at which the row begins
        try:
            names = _read_header(reader)
            if "\0" in "".join(names):  # UTF-16 without a byte order mark
                raise InputError(f"{path}: {NOT_UTF8}", hint=hint_encoding(path))
            if names[1:] and all(name.startswith(" ") for name in names[1:]):  # cells are separated by `, `
                file.seek(0)
                reader = csv.reader(file, delimiter=find_delimiter(path), skipinitialspace=True, strict=True)
                names = _read_header(reader)
            _check_names(path, names)
            line = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(names):
                    yield Row(number=line, fields=dict(zip(names, cells, strict=True)))
                elif cells:  # not an empty line
                    yield BadRow(number=line, reason=_CELLS)
                line = reader.line_num + 1
        except UnicodeDecodeError as error:
            place = f"in line {_find_other_encoding(path)}"
            raise InputError(f"{path}: {NOT_UTF8} {place} ({error.reason})", hint=hint_encoding(path)) from None
        except csv.Error as error:
            raise InputError(
                f"{path}, line {line}: broken CSV in the row that begins here: {error}",
                hint='check the quotes here and above: a quote in quoted text is written twice ("")',
            ) from None


def _find_other_encoding(path: Path) -> int:
    """Return the number of the first line that is not UTF-8, which the decoder does not know because it reads ahead."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1  # a character that is cut at the end of a line


def find_delimiter(path: Path) -> str:
    """Return the separator of a CSV file: the one that gives most of the first rows as many cells as the header."""
    matches = {mark: _count_like_header(path, mark) for mark in ",\t;"}
    return max(matches, key=lambda mark: matches[mark])  # of equal ones the first: the comma


def _count_like_header(path: Path, mark: str) -> int:
    """Return how many of the first rows have as many cells as the header; 0 if the separator is not in the header."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(islice(file, _PROBED_LINES), delimiter=mark)
        try:
            num_cells = len(_read_header(reader))
            return 1 + sum(len(cells) == num_cells for cells in reader) if num_cells > 1 else 0
        except csv.Error:  # reported when the rows are read
            return 0


def _read_header(reader: Iterator[list[str]]) -> list[str]:
    """Return the column names of a CSV file, without empty lines and Excel's line `sep=;` before them."""
    return next((cells for cells in reader if cells and cells[0] != "sep="), [])


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise InputError for duplicate column names; empty ones, as in spreadsheets, are allowed."""
    duplicates = [name for name, count in Counter(names).items() if name and count > 1]
    if duplicates:
        raise InputError(
            f"{path}: two columns are called {', '.join(map(repr, duplicates[:5]))}", hint="rename one of them"
        )


def _read_parquet(path: Path) -> Iterator[Row | BadRow]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        file = parquet.ParquetFile(path)
        _check_names(path, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                number += 1
                yield Row(number=number, fields=_remove_padding(fields))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{path}: broken Parquet: {first_line(error)}") from None
    except (OverflowError, ValueError) as error:
        raise InputError(
            f"{path}: a value after row {number:,} has no equivalent in Python: {first_line(error)}",
            hint="convert the column, for example timestamps to text",
        ) from None


def _remove_padding(fields: dict[str, Json]) -> dict[str, Json]:
    """Remove keys without a value from tools and messages with tool calls.

    In Parquet, the arguments of every call have the keys of all functions, with null for those that it does not use.
    """

    def has_tools(name: str, value: Json) -> bool:
        messages = value if isinstance(value, list) else []
        return name == TOOLS_FIELD or any(isinstance(turn, dict) and turn.get("tool_calls") for turn in messages)

    return {name: _remove_nulls(value) if has_tools(name, value) else value for name, value in fields.items()}


def _remove_nulls(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _remove_nulls(item) for key, item in value.items() if item is not None}
    return [_remove_nulls(item) for item in value] if isinstance(value, list) else value


def count_parquet_rows(path: Path) -> int:
    """Return the number of rows from the footer of the file."""
    from pyarrow import parquet

    return int(parquet.ParquetFile(path).metadata.num_rows)
