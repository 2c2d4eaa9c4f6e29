"""Results of the memory grid: one line per case while it runs, one sorted table at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from benchmarks.memory_grid.cases import ALL_BASES
from launcher.base_models.shapes import ModelShape, load_shape
from launcher.core.errors import InputError, Problem
from launcher.core.frozen_model import Frozen
from launcher.core.run_paths import write_text_atomically
from launcher.plan.estimate.memory.recipe import Recipe

ALLOCATOR = "expandable_segments:True"
# Equal in all rows of a table, and stored once in its header.
_COMMON = ("gpu", "versions")
_NOT_IN_TABLE = (*_COMMON, "date", "error", "left_out")


class GridRow(Frozen):
    """Result of a case; without memory figures on a CPU, and without any if it failed."""

    case: str = ""  # old tables have no names and lack some of these
    model: str
    recipe: dict[str, JsonValue] = Field(default_factory=dict)  # of the memory estimator, from the plan
    accumulation: int | None = None
    num_trainable: int | None = None
    predicted_terms: dict[str, int] = Field(default_factory=dict)  # before it ran, by name
    predicted_bytes: int | None = None  # of torch's allocator
    predicted_total_bytes: int | None = None  # with the CUDA context
    static_bytes: int | None = None  # held between two steps
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    context_bytes: int | None = None  # GPU memory in use outside torch's allocator
    leftover_bytes: int | None = None  # of the previous case, still allocated at the start
    predicted_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None  # the median
    steps_seconds: tuple[float, ...] = ()
    warm_seconds: float | None = None
    built_seconds: float | None = None
    case_seconds: float | None = None  # total, used to estimate similar cases
    num_graphs: int | None = None
    num_graph_breaks: int | None = None
    gpu: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    date: str = ""
    error: str | None = None
    left_out: str | None = None  # reason why it was not run

    @property
    def is_measured(self) -> bool:
        """Whether it has results."""
        return self.error is None and self.left_out is None

    def make_recipe(self) -> Recipe:
        """Return the estimator's input. Not validated: old tables may contain old kernel names."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in self.recipe.items()
        }
        return Recipe(**fields)


class GridTable(Frozen):
    """The committed table; its records lack the fields that are stored once here."""

    allocator: str = ""
    gpu: str | None = None
    date: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    shapes: dict[str, ModelShape]
    left_out: dict[str, str] = Field(default_factory=dict)  # case -> reason
    records: tuple[GridRow, ...]


def append_row(path: Path, row: GridRow) -> None:
    """Append atomically; an incomplete last line, left by a kill, is removed first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(row.model_dump_json(exclude_none=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", hint="choose another file with --out") from None


def load_rows(path: Path) -> tuple[GridRow, ...]:
    """Load the last row of each case, in order of their first; no rows if the file does not exist."""
    if not path.exists():
        return ()
    rows: dict[str, GridRow] = {}
    text = _read(path)
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            row = GridRow.model_validate_json(line)
        except ValidationError:
            raise InputError(f"{path}: line {number} is not a row of the memory grid") from None
        rows[row.case] = row
    return tuple(rows.values())


def make_table(rows: Sequence[GridRow]) -> GridTable:
    """Combine the rows of one machine into a table."""
    measured = [row for row in rows if row.is_measured]
    if not measured:
        raise InputError("nothing to collect: no case is measured")
    problems = tuple(
        Problem(where=name, what=" and ".join(sorted({str(getattr(row, name)) for row in measured})))
        for name in _COMMON
        if len({json.dumps(getattr(row, name), sort_keys=True) for row in measured}) > 1
    )
    if problems:
        raise InputError("rows from different machines or software versions", problems, "use one file per machine")
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
    """Write the table sorted and diffable: an indented header, then one line per record."""
    tree = table.model_dump(mode="json")
    records = [
        {name: value for name, value in record.items() if name not in _NOT_IN_TABLE} for record in tree.pop("records")
    ]
    lines = ",\n    ".join(json.dumps(record, sort_keys=True) for record in records)
    header = json.dumps(tree, indent=1, sort_keys=True).removesuffix("\n}")
    write_text_atomically(path, f'{header},\n "records": [\n    {lines}\n ]\n}}\n')


def load_table(path: Path) -> GridTable:
    """Load a committed table, or rows (.jsonl) that are still being measured."""
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
