"""Best-fit-decreasing bin packing of document lengths, over a whole split at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Part of every store's key: a change of the algorithm is a change of the packs.
PACKER_VERSION = 1

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Packing:
    """Documents in the order in which packs hold them, and where each pack begins in that order."""

    documents: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]  # one more than packs

    @property
    def num_packs(self) -> int:
        return len(self.starts) - 1


def pack_best_fit(lengths: Lengths, capacity: int, seed: int) -> Packing:
    """Longest first, each into the pack that it fills best; then the packs are shuffled.

    Free space is a small integer, so the packs with k free positions form a stack, and a bit set says which stacks
    have any. The best fit for a length is the lowest set bit at or above it: one shift and one mask.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise ValueError("a document is longer than a pack: cut it before packing")
    order = np.argsort(-lengths, kind="stable")
    pack_of = np.empty(len(lengths), dtype=np.int64)
    stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
    filled = 0  # bit k: some pack has k free positions
    num_packs = 0
    for position, length in enumerate(lengths[order].tolist()):
        room = filled >> length
        if room:
            free = length + (room & -room).bit_length() - 1
            stack = stacks[free]
            pack = stack.pop()
            if not stack:
                filled &= ~(1 << free)
        else:
            free, pack = capacity, num_packs
            num_packs += 1
        left = free - length
        if left:
            stacks[left].append(pack)
            filled |= 1 << left
        pack_of[position] = pack
    return _arrange(order, pack_of, num_packs, seed)


def pack_singly(lengths: Lengths) -> Packing:
    """No packing: a document each, in the order of the rows."""
    count = len(lengths)
    return Packing(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


def _arrange(order: npt.NDArray[np.int64], pack_of: npt.NDArray[np.int64], num_packs: int, seed: int) -> Packing:
    """Packs in shuffled order, so that long documents are not all at the front; documents of a pack by row."""
    shuffled = np.random.Generator(np.random.Philox(key=seed)).permutation(num_packs)
    pack_of = shuffled[pack_of]
    by_pack = np.lexsort((order, pack_of))
    counts = np.bincount(pack_of, minlength=num_packs) if num_packs else np.zeros(0, dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Packing(order[by_pack].astype(np.int64), starts)
