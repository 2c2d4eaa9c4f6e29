"""How long sequences are, how many a step has, how often rows are seen: from the rows' own number and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_USUAL_LENGTH = 2048
_HELD_WHOLE = 0.99  # of the rows
_BATCHES = (48, 32, 24, 16, 12, 8, 4, 2)  # sequences a step; most of them divide by 2, 3 and 4 GPUs
_FEWEST_STEPS = 100  # below it, a smaller batch teaches more than a smooth one
_MANY_ROWS, _FEW_ROWS = 10_000, 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    max_seq_length: int
    length_why: str
    global_batch_size: int
    batch_why: str
    epochs: float
    epochs_why: str


def choose_sizes(row_tokens: Sequence[float], num_rows: int, max_positions: int) -> Sizes:
    """`row_tokens` are estimates of the rows that were looked at; `num_rows` is how many there are."""
    epochs = 2.0 if num_rows >= _MANY_ROWS else 3.0 if num_rows >= _FEW_ROWS else 5.0
    needed = _find_needed(row_tokens)
    allowed = [length for length in _LENGTHS if length <= max_positions] or [max_positions]
    length = _choose_length(needed, allowed, at_least=_USUAL_LENGTH)
    if _count_steps(row_tokens, num_rows, length, epochs, _BATCHES[-2]) < _FEWEST_STEPS:  # shorter ones are more
        length = _choose_length(needed, allowed, at_least=allowed[0])
    steps = {batch: _count_steps(row_tokens, num_rows, length, epochs, batch) for batch in _BATCHES}
    batch = next((batch for batch in _BATCHES if steps[batch] >= _FEWEST_STEPS), _BATCHES[-1])
    few = f"; few a step, because the rows are few: with {_BATCHES[0]} it would be {steps[_BATCHES[0]]}"
    return Sizes(
        max_seq_length=length,
        length_why=_tell_length(row_tokens, needed, length),
        global_batch_size=batch,
        batch_why=f"about {steps[batch]:,} steps in all" + (few if batch < _BATCHES[0] else ""),
        epochs=epochs,
        epochs_why=f"{num_rows:,} rows, each seen {epochs:g} times",
    )


def _count_steps(row_tokens: Sequence[float], num_rows: int, length: int, epochs: float, batch: int) -> int:
    """Rows are packed, so that short ones waste nothing."""
    mean = sum(min(tokens, length) for tokens in row_tokens) / max(1, len(row_tokens))
    return max(1, round(epochs * max(1.0, num_rows * mean / length) / batch))


def _find_needed(row_tokens: Sequence[float]) -> float:
    ordered = sorted(row_tokens)
    return ordered[min(len(ordered) - 1, int(_HELD_WHOLE * len(ordered)))]


def _choose_length(needed: float, allowed: Sequence[int], at_least: int) -> int:
    """The shortest that holds nearly all rows."""
    usual = [length for length in allowed if length >= min(at_least, allowed[-1])]
    return next((length for length in usual if length >= needed), usual[-1])


def _tell_length(row_tokens: Sequence[float], needed: float, length: int) -> str:
    cut = sum(tokens > length for tokens in row_tokens)
    told = f"the longest of 99 in 100 rows has about {needed:,.0f} tokens"
    return told + (f"; {cut:,} of {len(row_tokens):,} are longer and will be cut" if cut else "")
