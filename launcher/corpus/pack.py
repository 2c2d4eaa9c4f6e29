"""Bin packing of document lengths, over a whole split at once: best fit first, exact patterns where they do better."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Part of every store's key: a change of the algorithm is a change of the packs.
PACKER_VERSION = 1

# What packing aims at: this share of the positions holds tokens.
_GOOD_ENOUGH = 0.998

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Packing:
    """Documents in the order in which packs hold them, and where each pack begins in that order."""

    documents: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]  # one more than packs

    @property
    def num_packs(self) -> int:
        return len(self.starts) - 1


def pack_tightest(lengths: Lengths, capacity: int, seed: int) -> Packing:
    """Best-fit-decreasing, unless it leaves more than 0.2 % empty and exact patterns leave less.

    Best fit ends with gaps that no document is short enough for: 1 to 2 % where all documents are alike (128 tokens in
    2,048). Patterns fill those exactly. Where few documents fit a sequence, best fit is the better of the two.
    """
    best = pack_best_fit(lengths, capacity, seed)
    total = int(lengths.sum(dtype=np.int64))
    if best.num_packs == 0 or total / (best.num_packs * capacity) >= _GOOD_ENOUGH:
        return best
    patterns = pack_patterns(lengths, capacity, seed)
    return patterns if patterns.num_packs < best.num_packs else best


def pack_best_fit(lengths: Lengths, capacity: int, seed: int) -> Packing:
    """Longest first, each into the pack that it fills best; then the packs are shuffled.

    Free space is a small integer, so the packs with k free positions form a stack, and a bit set says which stacks
    have any. The best fit for a length is the lowest set bit at or above it: one shift and one mask.
    """
    _check_lengths(lengths, capacity)
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


def pack_patterns(lengths: Lengths, capacity: int, seed: int) -> Packing:
    """The longest document with the set of others that fills its pack best, again and again.

    A pattern is a set of lengths, found by a subset-sum over bit sets; it is used as often as the supply of its lengths
    allows, so that a hundred thousand documents need a few hundred patterns.
    """
    _check_lengths(lengths, capacity)
    order = np.argsort(lengths, kind="stable")
    values, starts, counts = np.unique(lengths[order], return_index=True, return_counts=True)
    supply = dict(zip(values.tolist(), counts.tolist(), strict=True))
    taken = dict(zip(values.tolist(), starts.tolist(), strict=True))
    pack_of = np.empty(len(lengths), dtype=np.int64)
    num_packs = 0
    while supply:
        pattern = _find_pattern(supply, capacity)
        times = min(supply[length] // needed for length, needed in pattern.items())
        packs = np.arange(num_packs, num_packs + times)
        for length, needed in pattern.items():
            first, last = taken[length], taken[length] + needed * times
            pack_of[first:last] = np.repeat(packs, needed)
            taken[length] = last
            supply[length] -= needed * times
            if not supply[length]:
                del supply[length]
        num_packs += times
    return _arrange(order, pack_of, num_packs, seed)


def _find_pattern(supply: dict[int, int], capacity: int) -> dict[int, int]:
    """Lengths, and how many of each: the longest there is, and what fills the rest. Bit k: k can be filled."""
    longest = max(supply)
    room = capacity - longest
    reachable, inside = 1, (1 << (room + 1)) - 1
    history: list[tuple[int, int]] = []
    for length in sorted((length for length in supply if length <= room), reverse=True):
        for _ in range(min(supply[length] - (length == longest), room // length)):
            extended = (reachable | (reachable << length)) & inside
            if extended == reachable:
                break
            history.append((length, reachable))
            reachable = extended
        if reachable >> room:
            break
    filled = reachable.bit_length() - 1
    pattern = {longest: 1}
    for length, before in reversed(history):
        if not before >> filled & 1:
            filled -= length
            pattern[length] = pattern.get(length, 0) + 1
    return pattern


def pack_singly(lengths: Lengths) -> Packing:
    """No packing: a document each, in the order of the rows."""
    count = len(lengths)
    return Packing(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


def _check_lengths(lengths: Lengths, capacity: int) -> None:
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError("documents have at least one token, and at most as many as a pack: cut them before packing")


def _arrange(order: npt.NDArray[np.int64], pack_of: npt.NDArray[np.int64], num_packs: int, seed: int) -> Packing:
    """Packs in shuffled order, so that long documents are not all at the front; documents of a pack by row."""
    shuffled = np.random.Generator(np.random.Philox(key=seed)).permutation(num_packs)
    pack_of = shuffled[pack_of]
    by_pack = np.lexsort((order, pack_of))
    counts = np.bincount(pack_of, minlength=num_packs) if num_packs else np.zeros(0, dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Packing(order[by_pack].astype(np.int64), starts)
