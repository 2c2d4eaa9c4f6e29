"""Read the first rows of a dataset, to find its fields and to estimate the number and length of all rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from launcher.core.errors import InputError, Problem, hint_for
from launcher.corpus.conversations import TOOLS_FIELD, RowReader, find_task_field, make_row_reader
from launcher.corpus.row_text import list_columns, list_fields, look_up, parse_row_text
from launcher.corpus.rows import BadRow, Row
from launcher.corpus.sources import (
    FileSource,
    Source,
    count_parquet_rows,
    format_by_name,
    make_file_source,
    make_task_source,
)
from launcher.manifest.dataset import Dataset, FieldMapping
from launcher.manifest.parse_json import shorten
from launcher.plan.estimate.dataset_size import (
    ASSUMED_MEAN_TOKENS,
    BYTES_PER_TOKEN,
    SAMPLE_TRAIN,
    RowEstimate,
    estimate_without_rows,
)

_PEEKED_ROWS = 200
_MAX_PEEKED_ROWS = 20_000  # until every field that the manifest names has occurred: a context may be rare
_SAMPLED_ROWS = 2000
_EXPECTED = {"jsonl": "write one JSON object per line", "csv": "write a header and one row per line"}
_MAX_JSON_BYTES = 200_000_000  # a JSON list is read completely


def peek_rows(rows: Iterator[Row | BadRow], mapping: FieldMapping, count: int = _PEEKED_ROWS) -> list[Row | BadRow]:
    """Return the first `count` rows, and more rows until every field of the field mapping has occurred."""
    peeked: list[Row | BadRow] = []
    fields: set[str] = set()
    values = [value for value in mapping.model_dump().values() if isinstance(value, str)]
    while more := list(islice(rows, _PEEKED_ROWS if peeked else count)):
        peeked += more
        fields.update(list_fields([row for row in more if isinstance(row, Row)]))
        if len(peeked) >= _MAX_PEEKED_ROWS or _has_all(fields, values):
            break
    return peeked


def _has_all(fields: set[str], values: Sequence[str]) -> bool:
    try:
        return all(name in fields for value in values for name in list_columns(parse_row_text(value, fields)))
    except ValueError:  # reported when the reader is made
        return True


def make_source_reader(
    mapping: FieldMapping, system_prompt: str | None, source: Source, peeked: Sequence[Row | BadRow]
) -> RowReader:
    """Return the reader of a source's rows; raises InputError if no row is usable."""
    rows = [row for row in peeked if isinstance(row, Row)]
    fields = list_fields(rows)
    if not fields:
        problems = tuple(
            Problem(where=f"line {row.number}", what=row.reason) for row in peeked[:10] if isinstance(row, BadRow)
        )
        raise InputError(
            f"{source.location}: no usable row" + ("" if problems else ": it is empty"),
            problems,
            hint=_EXPECTED.get(source.format if isinstance(source, FileSource) else "", "rows need named fields"),
        )
    is_sample = source.location.endswith(SAMPLE_TRAIN)
    hint = "`launcher new EXPERT --data FILE --force` writes sample/ again, with all fields" if is_sample else ""
    return make_row_reader(
        mapping,
        fields,
        task=find_task_field(rows),
        source=source.location,
        system_prompt=system_prompt or "",
        hint=hint,
    )


def check_first_rows(dataset: Dataset, folder: Path, *, reads_values: bool = False) -> tuple[str, ...]:
    """Check the first rows of every local file and return notes; raises InputError if they do not fit the manifest.

    With `reads_values`, the rows are also converted to conversations, as in preparation.
    """
    missing, notes = find_missing_files(dataset, folder), note_missing_rows(dataset, folder)
    for key, path in _list_paths(dataset):
        if _is_file(folder / path):
            notes += _check_file(dataset, key, folder / path, reads_values=reads_values)
        elif key == "training.dataset.path" and key not in missing:
            notes.append(f"{key}: {path} is a dataset on the Hub; `launcher prepare` reads its rows")
    return (*notes, *_note_same_file(dataset, folder))


def _check_file(dataset: Dataset, key: str, path: Path, *, reads_values: bool) -> Iterator[str]:
    """Yield notes on the first rows of a file; raises InputError if they do not fit the manifest."""
    task = (dataset.tasks or {}).get(key.removeprefix("training.dataset.tasks.").rpartition(".")[0])
    source = make_file_source(path, dataset.format) if task is None else make_task_source(path, task.format)
    if is_too_large(source):
        return
    rows = iter(source.read())
    peeked = peek_rows(rows, dataset.mapping)
    reader = make_source_reader(dataset.mapping, dataset.system_prompt, source, peeked)
    broken = [row for row in peeked if isinstance(row, BadRow)]
    read = [reader.read(row) for row in peeked if isinstance(row, Row)] if reads_values else []
    unusable = [row for row in read if isinstance(row, BadRow)]
    if unusable and len(broken) + len(unusable) == len(peeked) and next(rows, None) is None:
        raise InputError(
            f"{source.location}: no row can be used",
            tuple(Problem(where=f"line {row.number}", what=row.reason) for row in unusable[:5]),
            hint="check training.dataset.field_mapping; `launcher new NAME --data FILE --dry-run` proposes one",
        )
    for bad, what in ((broken, "read"), (unusable, "used")):
        if bad:
            share = f"{len(bad):,} of the first {len(peeked):,} rows cannot be {what}"
            yield f"{key}: {share}; line {bad[0].number}: {bad[0].reason}"


def note_missing_rows(dataset: Dataset, folder: Path) -> list[str]:
    """Return a note for every local file of the manifest that does not exist."""
    missing = find_missing_files(dataset, folder)
    return [f"{key}: {path} does not exist, so its rows were not checked" for key, path in missing.items()]


def find_missing_files(dataset: Dataset, folder: Path) -> dict[str, Path]:
    """Return the files that a manifest names and that do not exist, by key; none if its dataset is on the Hub."""
    if "huggingface" in (dataset.format, dataset.type):
        return {}
    return {key: folder / path for key, path in _list_paths(dataset) if not _is_file(folder / path)}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long, or has a null character
        return False


def _note_same_file(dataset: Dataset, folder: Path) -> Iterator[str]:
    """Yield a note for every split that is read from the file of the training rows."""
    # Path.is_file raises for names that are too long; os.path.isfile does not.
    found = {key: folder / path for key, path in _list_paths(dataset)}
    files = {key: path.resolve() for key, path in found.items() if os.path.isfile(path)}  # noqa: PTH113
    train = files.get("training.dataset.path")
    for key, file in files.items():
        if key != "training.dataset.path" and file == train:
            yield f"{key} is the same file as training.dataset.path: results would be measured on training rows"


def _list_paths(dataset: Dataset) -> Iterator[tuple[str, str]]:
    for name in ("path", "validation_path", "test_path"):
        if path := getattr(dataset, name):
            yield f"training.dataset.{name}", path
    for task, files in (dataset.tasks or {}).items():
        for name in ("train", "valid", "test"):
            if path := getattr(files, name):
                yield f"training.dataset.tasks.{task}.{name}", path


def is_too_large(source: FileSource) -> bool:
    """Return whether a source is a JSON list of more than 200 MB, which can only be read completely."""
    return source.format == "json" and source.path.stat().st_size > _MAX_JSON_BYTES


def probe_rows(dataset: Dataset, folder: Path) -> RowEstimate:
    """Estimate number and length of the training rows from the local file, or from the manifest if there is none."""
    found = _probe_file(dataset, folder / dataset.path, dataset.format) if dataset.path else None
    rows = estimate_without_rows(dataset) if found is None else found
    path = Path(dataset.path or "")
    is_missing = format_by_name(path) is not None and not os.path.isfile(folder / path)  # noqa: PTH113
    if found is None and dataset.format != "huggingface" and is_missing:
        return replace(rows, count_basis=f"{dataset.path} is not on this machine: {rows.count_basis}")
    return rows


def probe_sample(dataset: Dataset, folder: Path) -> RowEstimate:
    """Estimate number and length of the rows in the smoke profile's sample, in the manifest's folder."""
    return _probe_file(dataset, folder / SAMPLE_TRAIN, "jsonl") or RowEstimate(
        num_rows=None, mean_tokens=ASSUMED_MEAN_TOKENS, count_basis=f"{SAMPLE_TRAIN} does not exist yet"
    )


def _probe_file(dataset: Dataset, file: Path, format_name: str | None) -> RowEstimate | None:
    """Estimate number and length of a file's rows from its size and first rows; None if it is missing or too large."""
    try:
        if not file.is_file():
            return None
        source = make_file_source(file, format_name)
        if is_too_large(source):
            return None
        rows = islice(source.read(), dataset.max_rows)
        peeked = peek_rows(rows, dataset.mapping, _SAMPLED_ROWS)
        num_rows, is_exact = count_rows(source, peeked, rows, dataset.max_rows)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"the training rows in {shorten(file.name)} cannot be read: {reason}", hint=hint_for(error)
        ) from None
    except ModuleNotFoundError:  # pyarrow, which planning does not require
        return None
    if not peeked:
        empty = f"{file.name} is empty"
        return RowEstimate(num_rows=0, mean_tokens=0.0, count_basis=empty, is_measured=True)
    reader = make_source_reader(dataset.mapping, dataset.system_prompt, source, peeked)
    columns = {*reader.columns, TOOLS_FIELD}
    sizes = [_count_bytes(row, columns) for row in peeked if isinstance(row, Row)]
    mean_bytes = sum(sizes) / len(sizes)
    return RowEstimate(
        num_rows=num_rows,
        mean_tokens=mean_bytes / BYTES_PER_TOKEN,
        count_basis=f"read from {file.name}: {_describe_count(num_rows, dataset.max_rows, is_exact=is_exact)}",
        length_basis=f" of {mean_bytes:.0f} bytes",
        is_measured=True,
        byte_tokens=mean_bytes / BYTES_PER_TOKEN,
    )


def _count_bytes(row: Row, columns: set[str]) -> int:
    """Return the size in bytes of a row as a line of JSON that has only the fields in `columns`."""
    used = {name: value for name in columns if (value := look_up(row.fields, name)) is not None}
    return len(json.dumps(used, ensure_ascii=False, default=str).encode(errors="replace")) + 1


def _describe_count(num_rows: int, max_rows: int | None, *, is_exact: bool) -> str:
    if num_rows == max_rows:
        return f"the first {num_rows:,} rows (max_rows)"
    return f"{'' if is_exact else 'about '}{num_rows:,} rows"


def count_rows(
    source: FileSource, peeked: Sequence[Row | BadRow], rest: Iterator[Row | BadRow], max_rows: int | None = None
) -> tuple[int, bool]:
    """Return the number of rows, and whether it is exact; otherwise it is estimated from the size of the first rows."""
    num_rows, is_exact = _count_all(source, peeked, rest)
    return (num_rows, is_exact) if max_rows is None or num_rows < max_rows else (max_rows, True)


def _count_all(source: FileSource, peeked: Sequence[Row | BadRow], rest: Iterator[Row | BadRow]) -> tuple[int, bool]:
    if source.format == "parquet":
        return count_parquet_rows(source.path), True
    if source.format == "json" or next(rest, None) is None:
        return len(peeked) + sum(1 for _ in rest), True
    is_csv = source.format == "csv"
    with source.path.open(encoding="utf-8", errors="replace", newline="" if is_csv else "\n") as file:
        lines = [len(line.encode()) for line in islice(file, peeked[-1].number - 1) if is_csv or line.strip()]
    header = lines[0] if is_csv else 0
    return round((source.path.stat().st_size - header) * (len(peeked) - 1) / (sum(lines) - header)), False
