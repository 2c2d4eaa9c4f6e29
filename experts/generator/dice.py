"""Random choices that are the same in every Python version.

Python guarantees the numbers of `Random(seed).random()` across versions, but not the results of `choice`, `sample` and
`shuffle`. So these are implemented here with `random()` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A seeded source of choices."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, end: int) -> int:
        return int(self._random.random() * end)

    def between(self, low: int, high: int) -> int:
        """Return an integer between both ends, inclusive."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffle(self, items: Sequence[T]) -> list[T]:
        """Return a shuffled copy."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in items]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        return self.shuffle(items)[:count]

    def subset(self, items: Sequence[T], count: int) -> list[T]:
        """Return a sample in the order of the items."""
        kept = set(self.sample(range(len(items)), count))
        return [item for index, item in enumerate(items) if index in kept]
