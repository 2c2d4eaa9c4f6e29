"""How many rows there are and how long, without tokenising: enough to estimate steps, hours and cost."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from launcher.errors import InputError
from launcher.manifest.dataset import Dataset

# Assumed where no row can be looked at: questions in words, a schema and a query, as the published experts have them.
ASSUMED_MEAN_TOKENS = 350.0
# Byte-level BPE on English, JSON and code: about 3.6 bytes a token.
BYTES_PER_TOKEN = 3.6
_SAMPLED_ROWS = 2000
_BYTES_OR_TOKENS = re.compile(r"( of \d+ bytes|; \d+ tokens a row are assumed)$")

SAMPLE_TRAIN = "sample/train.jsonl"
SAMPLE_VALIDATION = "sample/validation.jsonl"
SAMPLE_TEST = "sample/test.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEstimate:
    num_rows: int | None
    mean_tokens: float
    basis: str  # in words: how these are known

    @property
    def is_measured(self) -> bool:
        return self.basis.startswith("read")


def probe_rows(dataset: Dataset, folder: Path) -> RowEstimate:
    """From the local file where there is one, otherwise from what the manifest states."""
    file = folder / dataset.path if dataset.path else None
    if file is not None and file.suffix in (".jsonl", ".csv"):
        found = _sample_lines(file)
        if found is not None:
            return found
    stated = dataset.stated_train_rows
    if stated:
        return RowEstimate(
            num_rows=stated,
            mean_tokens=ASSUMED_MEAN_TOKENS,
            basis=f"the manifest states {stated:,} rows; {ASSUMED_MEAN_TOKENS:.0f} tokens a row are assumed",
        )
    return RowEstimate(
        num_rows=None, mean_tokens=ASSUMED_MEAN_TOKENS, basis="the number of rows is unknown before the data is read"
    )


def probe_sample(folder: Path) -> RowEstimate:
    """The sample of the smoke profile, which lies beside the manifest."""
    return _sample_lines(folder / SAMPLE_TRAIN) or RowEstimate(
        num_rows=None, mean_tokens=ASSUMED_MEAN_TOKENS, basis=f"{SAMPLE_TRAIN} is not there yet"
    )


def with_tokens_per_row(rows: RowEstimate, tokens_per_row: int) -> RowEstimate:
    """The user knows the rows better than an estimate does."""
    known = _BYTES_OR_TOKENS.sub("", rows.basis)
    return replace(
        rows,
        mean_tokens=float(tokens_per_row),
        basis=f"{known}; {tokens_per_row:,} tokens a row, as given by --tokens-per-row",
    )


def _sample_lines(file: Path) -> RowEstimate | None:
    """Rows are lines; beyond the sample their number follows from the file's size. None: there is no such file."""
    try:
        if not file.is_file():
            return None
        with file.open("rb") as lines:
            header = len(lines.readline()) if file.suffix == ".csv" else 0
            sampled = [len(line) for line in islice(lines, _SAMPLED_ROWS) if line.strip()]
            is_whole = lines.readline() == b""
        file_bytes = file.stat().st_size - header
    except OSError as error:
        name = file.name if len(file.name) <= 60 else file.name[:57] + "..."
        raise InputError(f"the training rows in {name} cannot be read: {error.strerror}") from None
    if not sampled:
        return RowEstimate(num_rows=0, mean_tokens=0.0, basis=f"read from {file.name}: it is empty")
    mean_bytes = sum(sampled) / len(sampled)
    num_rows = len(sampled) if is_whole else round(file_bytes / mean_bytes)
    return RowEstimate(
        num_rows=num_rows,
        mean_tokens=mean_bytes / BYTES_PER_TOKEN,
        basis=f"read from {file.name}: {'' if is_whole else 'about '}{num_rows:,} rows of {mean_bytes:.0f} bytes",
    )
