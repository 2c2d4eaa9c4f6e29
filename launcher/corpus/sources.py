"""Rows out of files and hub datasets, one by one, in bounded memory. A bad row is a value, never an exception."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.corpus.rows import BadRow, Json, Row
from launcher.errors import InputError, first_line
from launcher.manifest.spelling import closest

Format = Literal["jsonl", "json", "csv", "parquet"]

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSource:
    path: Path
    format: Format

    @property
    def name(self) -> str:
        return self.path.name

    def read(self) -> Iterator[Row | BadRow]:
        readers: dict[Format, Callable[[Path], Iterator[Row | BadRow]]] = {
            "jsonl": _read_jsonl,
            "json": _read_json,
            "csv": _read_csv,
            "parquet": _read_parquet,
        }
        try:
            yield from readers[self.format](self.path)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """A dataset of the Hugging Face hub: from the cache on disk where it lies there, else over the network."""

    dataset: str
    config: str | None
    split: str
    revision: str | None
    streaming: bool = False  # rows come one by one over the network, and the dataset is never on disk whole

    @property
    def name(self) -> str:
        return f"{self.dataset}:{self.split}"

    @property
    def fingerprint(self) -> str:
        """Of the revision's files: `datasets`' own, or the commit where they are not fetched."""
        if not self.streaming:
            return str(self.load()._fingerprint)
        from huggingface_hub import HfApi

        try:
            return f"{self.config}@{HfApi().dataset_info(self.dataset, revision=self.revision).sha}"
        except Exception as error:  # the hub's client raises whatever its network layer raises
            raise self._unreachable(error) from None

    def read(self) -> Iterator[Row | BadRow]:
        for number, fields in enumerate(self.load(), 1):
            yield Row(number=number, fields=fields)

    def load(self) -> Any:
        """The `datasets.Dataset`; an InputError with the local alternatives where it cannot be had."""
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
            f"{self.dataset}: this dataset is neither in the cache nor to be had from the hub",
            hint="download it where there is a network (HF_HOME says where the cache lies), or name a local "
            "file: --set training.dataset.path=rows.jsonl --set training.dataset.format=jsonl; "
            f"datasets says: {first_line(error)}",
        )


Source = FileSource | HubSource


def make_file_source(path: Path, wanted: str | None) -> FileSource:
    """A local file by its path; the format from the manifest, or from the name."""
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file in it: {', '.join(_data_files(path)) or 'it has none'}")
    if not path.is_file():
        raise _missing(path)
    by_name = _SUFFIXES.get(path.suffix.lower()) if wanted in (None, "huggingface") else None
    format_ = by_name or next((known for known in _SUFFIXES.values() if known == wanted), None)
    if format_ is None:
        known = ", ".join(sorted(set(_SUFFIXES.values())))
        raise InputError(f"{path}: unknown format", hint=f"say it: training.dataset.format is one of {known}")
    return FileSource(path=path, format=format_)


def _missing(path: Path) -> InputError:
    nearby = _data_files(path.parent)
    meant = closest(path.name, nearby)
    hint = f"did you mean {path.parent / meant}?" if meant else "training.dataset.path starts at the manifest's folder"
    return InputError(f"{path}: no such file", hint=hint)


def _data_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(file.name for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)[:20]


def _read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            raw = line.removeprefix(_UTF8_BOM) if number == 1 else line
            if raw.strip():
                yield _parse_line(raw, number)


def _parse_line(raw: bytes, number: int) -> Row | BadRow:
    try:
        fields: Json = json.loads(raw)
    except UnicodeDecodeError:
        return BadRow(number=number, reason="not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadRow(
            number=number, reason=f"broken JSON: {error.msg if isinstance(error, json.JSONDecodeError) else error}"
        )
    if not isinstance(fields, dict):
        return BadRow(number=number, reason="not an object")
    return Row(number=number, fields=fields)


def _read_json(path: Path) -> Iterator[Row | BadRow]:
    """A list of objects. It is read whole: JSON has no lines to stop at."""
    try:
        rows: Json = json.loads(path.read_bytes().removeprefix(_UTF8_BOM))
    except ValueError as error:
        raise InputError(f"{path}: broken JSON: {error}", hint="one object a line is .jsonl") from None
    if not isinstance(rows, list):
        raise InputError(f"{path}: holds no list of rows", hint="[{...}, {...}], or one object a line in a .jsonl file")
    for number, fields in enumerate(rows, 1):
        if isinstance(fields, dict):
            yield Row(number=number, fields=fields)
        else:
            yield BadRow(number=number, reason="not an object")


def _read_csv(path: Path) -> Iterator[Row | BadRow]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", errors="strict", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for fields in reader:
                if None in fields or None in fields.values():
                    yield BadRow(number=reader.line_num, reason="more or fewer cells than the header")
                else:
                    yield Row(number=reader.line_num, fields=fields)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 ({error.reason})", hint="save the file as UTF-8") from None
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: broken CSV: {error}") from None


def _read_parquet(path: Path) -> Iterator[Row | BadRow]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                number += 1
                yield Row(number=number, fields=fields)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: broken Parquet: {first_line(error)}") from None


def count_parquet_rows(path: Path) -> int:
    """From the file's own foot: nothing else is read."""
    from pyarrow import parquet

    return int(parquet.ParquetFile(path).metadata.num_rows)
