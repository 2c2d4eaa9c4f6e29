"""How many rows there are and how long, without tokenising: enough to estimate steps, hours and cost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from launcher.manifest.dataset import Dataset

# Rows of the text-to-code data that the published experts train on: mean about 350 tokens with their schema (TARGETS).
ASSUMED_MEAN_TOKENS = 350.0
# Byte-level BPE on English, JSON and code: about 3.6 bytes a token.
BYTES_PER_TOKEN = 3.6
_SAMPLED_ROWS = 2000

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
    if file is not None and file.is_file() and file.suffix in (".jsonl", ".csv"):
        return _sample_lines(file)
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
    file = folder / SAMPLE_TRAIN
    if file.is_file():
        return _sample_lines(file)
    return RowEstimate(num_rows=None, mean_tokens=ASSUMED_MEAN_TOKENS, basis=f"{SAMPLE_TRAIN} is not there yet")


def _sample_lines(file: Path) -> RowEstimate:
    """Rows are lines; beyond the sample their number follows from the file's size."""
    with file.open("rb") as lines:
        sizes = [len(line) for line in islice(lines, _SAMPLED_ROWS) if line.strip()]
    if not sizes:
        return RowEstimate(num_rows=0, mean_tokens=0.0, basis=f"read from {file.name}: it is empty")
    mean_bytes = sum(sizes) / len(sizes)
    is_whole = len(sizes) < _SAMPLED_ROWS
    num_rows = len(sizes) if is_whole else round(file.stat().st_size / mean_bytes)
    return RowEstimate(
        num_rows=num_rows,
        mean_tokens=mean_bytes / BYTES_PER_TOKEN,
        basis=f"read from {file.name}: {'' if is_whole else 'about '}{num_rows:,} rows of {mean_bytes:.0f} bytes",
    )
