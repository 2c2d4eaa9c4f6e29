"""What the memory grid measured: a line a case while it runs, one sorted table when it is done."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from launcher.bench.memory_cases import ALL_BASES
from launcher.errors import InputError, Problem
from launcher.memory import Recipe
from launcher.paths import write_text_atomically
from launcher.shapes import ModelShape, load_shape
from launcher.values import Frozen

ALLOCATOR = "expandable_segments:True"
# What is alike in all rows of a table, and stands at its head.
_COMMON = ("gpu", "versions")
_NOT_IN_TABLE = (*_COMMON, "date", "error", "left_out")


class GridRow(Frozen):
    """One case. Without a GPU there are no figures of memory; where it failed, there are none at all."""

    case: str = ""  # tables of before the cases had names lack some of these
    model: str
    recipe: dict[str, JsonValue] = Field(default_factory=dict)  # of launcher/memory, as the plan has it
    accumulation: int | None = None
    num_trainable: int | None = None
    predicted_terms: dict[str, int] = Field(default_factory=dict)  # before it ran, by name
    predicted_bytes: int | None = None  # of torch's allocator
    predicted_total_bytes: int | None = None  # with the CUDA context
    static_bytes: int | None = None  # held between two steps
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    context_bytes: int | None = None  # of the card's memory in use, what torch does not know of
    leftover_bytes: int | None = None  # of the case before, still allocated when this one began
    predicted_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None  # the median
    steps_seconds: tuple[float, ...] = ()
    warm_seconds: float | None = None
    built_seconds: float | None = None
    case_seconds: float | None = None  # all of it: what a case like it will take
    num_graphs: int | None = None
    num_graph_breaks: int | None = None
    gpu: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    date: str = ""
    error: str | None = None
    left_out: str | None = None  # why it was not tried

    @property
    def is_measured(self) -> bool:
        return self.error is None and self.left_out is None

    def make_recipe(self) -> Recipe:
        """Not validated: tables outlive the names of kernels."""
        fields: dict[str, Any] = dict(self.recipe)
        return Recipe(**{**fields, "target_modules": tuple(fields["target_modules"])})


class GridTable(Frozen):
    """What is committed. `records` are rows without what stands here for all of them."""

    allocator: str = ""
    gpu: str | None = None
    date: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    shapes: dict[str, ModelShape]
    left_out: dict[str, str] = Field(default_factory=dict)  # case -> why
    records: tuple[GridRow, ...]


def append_row(path: Path, row: GridRow) -> None:
    """Whole or not at all: what a kill left of a line before it is cut away."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.write(row.model_dump_json(exclude_none=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", hint="--out names another file") from None


def load_rows(path: Path) -> tuple[GridRow, ...]:
    """The last row of each case, in the order of their first; none where there is no file yet."""
    if not path.exists():
        return ()
    rows: dict[str, GridRow] = {}
    text = _read(path)
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            row = GridRow.model_validate_json(line)
        except ValidationError:
            raise InputError(f"{path}: line {number} is no row of the memory grid") from None
        rows[row.case] = row
    return tuple(rows.values())


def make_table(rows: Sequence[GridRow]) -> GridTable:
    """Of one machine: figures of two cards in one table would be of none."""
    measured = [row for row in rows if row.is_measured]
    if not measured:
        raise InputError("no case is measured: there is nothing to collect")
    problems = tuple(
        Problem(where=name, what=" and ".join(sorted({str(getattr(row, name)) for row in measured})))
        for name in _COMMON
        if len({json.dumps(getattr(row, name), sort_keys=True) for row in measured}) > 1
    )
    if problems:
        raise InputError("the rows are of different machines, or software", problems, "measure each into its own file")
    models = sorted({row.model for row in measured})
    records = [row.model_copy(update=dict.fromkeys(("gpu", "error", "left_out"))) for row in measured]
    return GridTable(
        allocator=ALLOCATOR,
        gpu=measured[0].gpu,
        date=max(row.date for row in measured),
        versions=measured[0].versions,
        shapes={model: load_shape(ALL_BASES[model], ()) for model in models},
        left_out={row.case: row.left_out for row in rows if row.left_out is not None},
        records=tuple(sorted(records, key=lambda row: (row.model, row.case))),
    )


def write_table(path: Path, table: GridTable) -> None:
    """Sorted and diffable: the head laid out, then a line a record."""
    tree = table.model_dump(mode="json")
    records = [
        {name: value for name, value in record.items() if name not in _NOT_IN_TABLE} for record in tree.pop("records")
    ]
    lines = ",\n    ".join(json.dumps(record, sort_keys=True) for record in records)
    head = json.dumps(tree, indent=1, sort_keys=True).removesuffix("\n}")
    write_text_atomically(path, f'{head},\n "records": [\n    {lines}\n ]\n}}\n')


def load_table(path: Path) -> GridTable:
    """A committed table, or rows that are being measured."""
    text = _read(path)
    if path.suffix == ".jsonl":
        return make_table(load_rows(path))
    try:
        return GridTable.model_validate_json(text)
    except ValidationError as error:
        raise InputError(f"{path}: not a table of the memory grid ({error.error_count()} problems)") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
