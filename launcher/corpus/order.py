"""The order of an epoch: a permutation of packs that depends on the seed and the epoch alone, never on the hardware."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]

# Grouping by length: rows are shuffled, then sorted inside windows of this many global batches.
_WINDOW_BATCHES = 50


def epoch_order(num_packs: int, seed: int, epoch: int) -> Order:
    """Philox keyed by (seed, epoch): the same on every machine and version of numpy that keeps its stream."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(num_packs)


def grouped_order(lengths: npt.NDArray[np.int32], batch_size: int, seed: int, epoch: int) -> Order:
    """Rows of like length side by side, so that padding is short; batches themselves stay in random order."""
    order = epoch_order(len(lengths), seed, epoch)
    window = max(1, batch_size * _WINDOW_BATCHES)
    windows = [order[start : start + window] for start in range(0, len(order), window)]
    grouped = [part[np.argsort(-lengths[part], kind="stable")] for part in windows]
    batches = [part[start : start + batch_size] for part in grouped for start in range(0, len(part), batch_size)]
    whole = [batch for batch in batches if len(batch) == batch_size]
    rest = [batch for batch in batches if len(batch) < batch_size]
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch + (1 << 32)]))
    mixed = [whole[index] for index in generator.permutation(len(whole))]
    return np.concatenate([*mixed, *rest]) if batches else order
