"""Rows of the training data that become the validation split if there is no validation file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from launcher.corpus.rows import Row
from launcher.corpus.spec import PreparationSpec

# Share of the prompts that are held out, as in the published trainer.
_SHARE = 0.1
# More of the rows are not held out if some of them have the same prompt.
_MAX_SHARE = 0.2
_COUNTED_ROWS = 10_000  # of each source, to find prompts of many rows


@dataclass(frozen=True, slots=True)
class ValidationCut:
    """Division of rows between training and validation by the hash of the prompt, so that no prompt is in both."""

    trained: frozenset[int] = frozenset()  # prompts that the hash would hold out, but that too many rows have

    def holds_out(self, prompt_hash: int) -> bool:
        """Return whether the rows with a prompt are held out for validation."""
        return prompt_hash < _SHARE * 2**64 and prompt_hash not in self.trained

    def select(self, prompt_hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are held out for validation."""
        is_selected = prompt_hashes < np.uint64(_SHARE * 2**64)
        return is_selected & ~np.isin(prompt_hashes, np.array(sorted(self.trained), dtype=np.uint64))


def choose_validation_cut(prompt_hashes: Sequence[int]) -> ValidationCut:
    """Choose the prompts to hold out from the prompt hashes of all rows.

    Where many rows have the same prompt, a tenth of the prompts can be most of the rows. While more than a fifth of the
    rows would be held out, the most frequent prompt among them is trained instead.
    """
    hashes = np.array(prompt_hashes, dtype=np.uint64)
    prompts, counts = np.unique(hashes[ValidationCut().select(hashes)], return_counts=True)
    order = np.argsort(counts, kind="stable")
    is_trained = (np.cumsum(counts[order]) > _MAX_SHARE * len(hashes)) & (counts[order] > 1)
    return ValidationCut(frozenset(prompts[order][is_trained].tolist()))


def read_validation_cut(spec: PreparationSpec) -> ValidationCut:
    """Choose the prompts to hold out from the first rows of every training file."""
    hashes: list[int] = []
    for weighted in spec.train:
        builder, rows = spec.open_rows(weighted)
        found = (builder.hash_prompt(row) for row in islice(rows, _COUNTED_ROWS) if isinstance(row, Row))
        hashes += (prompt_hash for prompt_hash in found if prompt_hash is not None)
    return choose_validation_cut(hashes)
