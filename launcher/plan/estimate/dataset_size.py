"""Number and mean length of rows without tokenizing, to estimate steps, hours and cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from launcher.core.errors import InputError
from launcher.manifest.dataset import Dataset

# Assumed if no row can be read: a question, a schema and a query, as in the published experts.
ASSUMED_MEAN_TOKENS = 350.0
# Byte-level BPE on English, JSON and code: about 3.6 bytes per token.
BYTES_PER_TOKEN = 3.6
_SAMPLED_ROWS = 2000

SAMPLE_TRAIN = "sample/train.jsonl"
SAMPLE_VALIDATION = "sample/validation.jsonl"
SAMPLE_TEST = "sample/test.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEstimate:
    """Number of rows, their mean length, and where both come from."""

    num_rows: int | None
    mean_tokens: float
    count_basis: str  # text: how the number of rows is known
    length_basis: str = ""  # text that follows count_basis: how the mean length is known
    is_measured: bool = False  # the rows were read from a file
    is_length_assumed: bool = False  # the number of rows is known, but mean_tokens is an assumption

    @property
    def basis(self) -> str:
        return f"{self.count_basis}{self.length_basis}"


def probe_rows(dataset: Dataset, folder: Path) -> RowEstimate:
    """Return the estimate from the local file if it exists, otherwise from the manifest."""
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
            count_basis=f"the manifest states {stated:,} rows",
            length_basis=f"; {ASSUMED_MEAN_TOKENS:.0f} tokens per row are assumed",
            is_length_assumed=True,
        )
    return RowEstimate(
        num_rows=None,
        mean_tokens=ASSUMED_MEAN_TOKENS,
        count_basis="the number of rows is unknown before the data is read",
    )


def probe_sample(folder: Path) -> RowEstimate:
    """Return the estimate for the sample of the smoke profile, in the manifest's folder."""
    return _sample_lines(folder / SAMPLE_TRAIN) or RowEstimate(
        num_rows=None, mean_tokens=ASSUMED_MEAN_TOKENS, count_basis=f"{SAMPLE_TRAIN} is not there yet"
    )


def with_tokens_per_row(rows: RowEstimate, tokens_per_row: int) -> RowEstimate:
    """Return the estimate with the row length set by --tokens-per-row."""
    return replace(
        rows,
        mean_tokens=float(tokens_per_row),
        length_basis=f"; {tokens_per_row:,} tokens per row, as given by --tokens-per-row",
        is_length_assumed=False,
    )


def _sample_lines(file: Path) -> RowEstimate | None:
    """Return the estimate from the first lines and the file size, or None if the file does not exist."""
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
        empty = f"read from {file.name}: it is empty"
        return RowEstimate(num_rows=0, mean_tokens=0.0, count_basis=empty, is_measured=True)
    mean_bytes = sum(sampled) / len(sampled)
    num_rows = len(sampled) if is_whole else round(file_bytes / mean_bytes)
    return RowEstimate(
        num_rows=num_rows,
        mean_tokens=mean_bytes / BYTES_PER_TOKEN,
        count_basis=f"read from {file.name}: {'' if is_whole else 'about '}{num_rows:,} rows",
        length_basis=f" of {mean_bytes:.0f} bytes",
        is_measured=True,
    )
