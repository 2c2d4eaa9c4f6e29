"""Pack the documents of a complete split into nearly full sequences, with random documents in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Part of every store's key: a change of the algorithm is a change of the packs.
PACKER_VERSION = 2

# Random documents that are tried for the rest of a pack.
_ATTEMPTS = 8

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Packing:
    """Assignment of documents to packs: the documents in pack order, and where each pack starts in that order."""

    documents: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]  # num_packs + 1 entries

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.starts) - 1


def pack_documents(lengths: Lengths, capacity: int, seed: int) -> Packing:
    """Pack documents in random order; the last ones of a pack are chosen to fill its remaining space.

    Packing by decreasing length fills packs no better, but puts documents of equal length into one pack. Rows of equal
    length are often alike (the same table, the same kind of question), and a step that trains few kinds of rows has
    noisier gradients than a step of random rows. Long documents start packs, because they rarely fit into a pack that
    has others. Two limits for a long document are tried, a quarter and half of the capacity, and the packing with fewer
    packs is returned.
    """
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError("documents must have between 1 token and the pack's capacity: truncate them before packing")
    packings = [_pack(lengths, capacity, seed, capacity // parts) for parts in (4, 2)]
    return min(packings, key=lambda packing: packing.num_packs)


def _pack(lengths: Lengths, capacity: int, seed: int, longest_random: int) -> Packing:
    """Pack documents; while any that is left is longer than `longest_random`, each pack starts with the longest."""
    pool = _Pool(lengths, capacity, seed)
    pack_of = np.empty(len(lengths), dtype=np.int64)
    num_packs = 0
    while pool.available:
        room = capacity
        chosen = (pool.longest,) if pool.longest > longest_random else pool.choose(room)
        while chosen:
            for length in chosen:
                pack_of[pool.pop(length)] = num_packs
            room -= sum(chosen)
            chosen = pool.choose(room)
        num_packs += 1
    return _arrange(pack_of, num_packs, seed)


class _Pool:
    """Documents that are not packed yet, by length. Bit k of `available` is set if one of them has k tokens."""

    def __init__(self, lengths: Lengths, capacity: int, seed: int) -> None:
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(lengths))
        self._documents: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._random = lengths[order].tolist()  # lengths as often as they occur, in random order
        self._next = 0
        self.available = 0
        for document, length in zip(order.tolist(), self._random, strict=True):
            self._documents[length].append(document)
            self.available |= 1 << length

    @property
    def longest(self) -> int:
        return self.available.bit_length() - 1

    def pop(self, length: int) -> int:
        documents = self._documents[length]
        document = documents.pop()
        if not documents:
            self.available &= ~(1 << length)
        return document

    def choose(self, room: int) -> tuple[int, ...]:
        """Return the lengths of documents that together fit into `room` tokens; empty if no document fits.

        If `room` is at least three times the longest length, this is one random document. Otherwise several
        combinations are tried (one or two random documents, and the longest that fits next to them), and the one that
        leaves the smallest gap is returned.
        """
        if room >= 3 * self.longest > 0:
            return (self._draw(room) or self.longest,)
        best = self._complete((), room)
        gap = room - sum(best)
        for attempt in range(_ATTEMPTS):
            if gap == 0:
                break
            chosen = self._complete(self._draw_some(1 + attempt % 2, room), room)
            if room - sum(chosen) < gap:
                best, gap = chosen, room - sum(chosen)
        return best

    def _draw_some(self, count: int, room: int) -> tuple[int, ...]:
        """Return the lengths of up to `count` random documents that fit together."""
        chosen: tuple[int, ...] = ()
        for _ in range(count):
            length = self._draw(room - sum(chosen))
            if length and len(self._documents[length]) > chosen.count(length):
                chosen = (*chosen, length)
        return chosen

    def _complete(self, chosen: tuple[int, ...], room: int) -> tuple[int, ...]:
        """Add the length of the longest document that fits next to the chosen ones, if there is one."""
        length = (self.available & ((2 << (room - sum(chosen))) - 1)).bit_length() - 1
        return chosen if length < 1 or len(self._documents[length]) <= chosen.count(length) else (*chosen, length)

    def _draw(self, room: int) -> int:
        """Return the length of a random document of at most `room` tokens, or 0 if a few random draws found none."""
        for _ in range(_ATTEMPTS):
            length: int = self._random[self._next]
            self._next = (self._next + 1) % len(self._random)
            if length <= room and self._documents[length]:
                return length
        return 0


def pack_one_per_sequence(lengths: Lengths) -> Packing:
    """Return a packing with one document per sequence, in row order."""
    count = len(lengths)
    return Packing(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


def _arrange(pack_of: npt.NDArray[np.int64], num_packs: int, seed: int) -> Packing:
    """Shuffle the packs, so that long documents are not all at the front; sort the documents of a pack by row."""
    pack_of = np.random.Generator(np.random.Philox(key=seed)).permutation(num_packs)[pack_of]
    counts = np.bincount(pack_of, minlength=num_packs)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Packing(np.argsort(pack_of, kind="stable"), starts)
