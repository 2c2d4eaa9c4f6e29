"""Number and mean length of rows without tokenizing, to estimate steps, hours and cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.manifest.dataset import Dataset

# Assumed if no row can be read: a question, a schema and a query, as in the published experts.
ASSUMED_MEAN_TOKENS = 350.0
# Byte-level BPE on English, JSON and code: about 3.6 bytes per token.
BYTES_PER_TOKEN = 3.6

# Prepared data: a token's number and whether it is trained; length and number of each row.
_BYTES_PER_PREPARED_TOKEN = 4 + 1
_BYTES_PER_PREPARED_ROW = 4 + 8

SAMPLE_TRAIN = "sample/train.jsonl"
SAMPLE_VALIDATION = "sample/validation.jsonl"
SAMPLE_TEST = "sample/test.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEstimate:
    """Estimated number of rows and mean tokens per row, and how both are known."""

    num_rows: int | None
    mean_tokens: float
    count_basis: str  # text: how the number of rows is known
    length_basis: str = ""  # text that follows count_basis: how the mean length is known
    is_measured: bool = False  # the rows were read from a file
    is_length_assumed: bool = False  # the number of rows is known, but mean_tokens is an assumption
    num_sequences: int | None = None  # of an epoch, from prepared data or the first rows; None: from mean_tokens
    num_validation_rows: int | None = None
    trained_share: float = 1.0  # of the tokens; 1 if unknown, which takes the longest
    byte_tokens: float = 0.0  # mean length by bytes, which decides the sequence length of the smoke profile

    @property
    def basis(self) -> str:
        return f"{self.count_basis}{self.length_basis}"


def estimate_prepared_bytes(num_rows: int, mean_tokens: float) -> float:
    """Return the disk space of prepared training and validation rows."""
    return num_rows * (mean_tokens * _BYTES_PER_PREPARED_TOKEN + _BYTES_PER_PREPARED_ROW)


def estimate_without_rows(dataset: Dataset) -> RowEstimate:
    """Return the estimate for a dataset whose rows are not read, from the row counts stated in the manifest."""
    stated, most = dataset.stated_train_rows, dataset.max_rows
    if stated:
        used = stated if most is None else min(stated, most)
        return RowEstimate(
            num_rows=used,
            mean_tokens=ASSUMED_MEAN_TOKENS,
            count_basis=f"the manifest states {stated:,} rows" + (f", max_rows is {most:,}" if used < stated else ""),
            length_basis=f"; {ASSUMED_MEAN_TOKENS:.0f} tokens per row are assumed",
            is_length_assumed=True,
        )
    return RowEstimate(
        num_rows=None,
        mean_tokens=ASSUMED_MEAN_TOKENS,
        count_basis="the number of rows is unknown before the data is read",
    )


def with_tokens_per_row(rows: RowEstimate, tokens_per_row: int) -> RowEstimate:
    """Return the estimate with the row length set by --tokens-per-row."""
    return replace(
        rows,
        mean_tokens=float(tokens_per_row),
        length_basis=f"; {tokens_per_row:,} tokens per row, as given by --tokens-per-row",
        is_length_assumed=False,
        byte_tokens=float(tokens_per_row) if rows.is_measured else 0.0,
    )
