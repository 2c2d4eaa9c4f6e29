"""Propose sequence length, global batch size and epochs from the number and lengths of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_USUAL_LENGTH = 2048
_COVERED_SHARE = 0.99  # of the rows fit into a sequence
_BATCH_SIZES = (48, 32, 24, 16, 12, 8, 4, 2)  # sequences per step; most are divisible by 2, 3 and 4 GPUs
_FEW_STEPS = 20  # an adapter hardly changes in fewer
_MIN_STEPS = 100  # with fewer optimizer steps, a smaller batch learns more
_MANY_ROWS, _FEW_ROWS = 10_000, 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters:
    """Proposed values, each with its reason."""

    max_seq_length: int
    length_reason: str
    global_batch_size: int
    batch_reason: str
    epochs: float
    epochs_reason: str


def choose_hyperparameters(
    row_tokens: Sequence[float], num_rows: int, max_positions: int, num_train_rows: int | None = None
) -> Hyperparameters:
    """Choose hyperparameters by estimated tokens per row (`row_tokens`, a sample) and the dataset's number of rows.

    `num_train_rows` are those that are not held out for validation.
    """
    epochs = 2.0 if num_rows >= _MANY_ROWS else 3.0 if num_rows >= _FEW_ROWS else 5.0
    num_train = num_rows if num_train_rows is None else num_train_rows
    ordered = sorted(row_tokens)
    needed = ordered[min(len(ordered) - 1, int(_COVERED_SHARE * len(ordered)))]
    allowed = [length for length in _LENGTHS if length <= max_positions] or [max_positions]
    length = _choose_length(needed, allowed, at_least=_USUAL_LENGTH)
    if _count_steps(row_tokens, num_train, length, epochs, _BATCH_SIZES[-2]) < _MIN_STEPS:
        length = _choose_length(needed, allowed, at_least=allowed[0])  # shorter sequences make more steps
    steps = {batch: _count_steps(row_tokens, num_train, length, epochs, batch) for batch in _BATCH_SIZES}
    batch = next((batch for batch in _BATCH_SIZES if steps[batch] >= _MIN_STEPS), _BATCH_SIZES[-1])
    few = steps[_BATCH_SIZES[0]]
    small = f"; small because the dataset is small: {_BATCH_SIZES[0]} would give only {few} step{'s'[: few != 1]}"
    if few == steps[batch]:
        small = "; an epoch is smaller than a batch"
    if steps[batch] < _FEW_STEPS:
        more = ceil(epochs * _FEW_STEPS / steps[batch])
        small += f"; so few steps hardly train the model: add rows, or set epochs to {more} or more"
    num_cut = sum(tokens > length for tokens in row_tokens)
    cut = f"; {num_cut:,} of {len(row_tokens):,} are longer and will be truncated" if num_cut else ""
    return Hyperparameters(
        max_seq_length=length,
        length_reason=f"99 % of the rows have at most about {needed:,.0f} tokens{cut}",
        global_batch_size=batch,
        batch_reason=f"about {steps[batch]:,} steps in total" + (small if batch < _BATCH_SIZES[0] else ""),
        epochs=epochs,
        epochs_reason=f"{num_rows:,} rows, each seen {epochs:g} times",
    )


def _count_steps(row_tokens: Sequence[float], num_rows: int, length: int, epochs: float, batch: int) -> int:
    """Estimate the number of optimizer steps with packing, as if all packs were full."""
    mean = sum(min(tokens, length) for tokens in row_tokens) / max(1, len(row_tokens))
    return ceil(epochs * ceil(max(1.0, num_rows * mean / length) / batch))


def _choose_length(needed: float, allowed: Sequence[int], at_least: int) -> int:
    usual = [length for length in allowed if length >= min(at_least, allowed[-1])]
    return next((length for length in usual if length >= needed), usual[-1])
