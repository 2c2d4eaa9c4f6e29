"""Order of packs in an epoch: a permutation that depends only on the seed and the epoch, never on the hardware."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]

# Rows are shuffled, then sorted by length within windows of this many global batches.
_WINDOW_BATCHES = 50
_REPLACES_EPOCH_0 = 1 << 33  # of seed 0


def make_epoch_order(num_packs: int, seed: int, epoch: int) -> Order:
    """Return the order of packs in an epoch: a Philox permutation keyed with (seed, epoch), equal on every machine."""
    # bin_packing.py shuffles the packs by the key (0, 0). The same key would restore their order: long documents first.
    key = [seed, epoch] if seed or epoch else [0, _REPLACES_EPOCH_0]
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_packs)


def make_grouped_order(lengths: npt.NDArray[np.int32], batch_size: int, seed: int, epoch: int) -> Order:
    """Return an order that batches rows of similar length, to reduce padding; the batches are in random order."""
    order = make_epoch_order(len(lengths), seed, epoch)
    window = max(1, batch_size * _WINDOW_BATCHES)
    windows = [order[start : start + window] for start in range(0, len(order), window)]
    grouped = [part[np.argsort(-lengths[part], kind="stable")] for part in windows]
    batches = [part[start : start + batch_size] for part in grouped for start in range(0, len(part), batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size]
    rest = [batch for batch in batches if len(batch) < batch_size]
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch + (1 << 32)]))
    mixed = [full[index] for index in generator.permutation(len(full))]
    return np.concatenate([*mixed, *rest]) if batches else order
