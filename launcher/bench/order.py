"""In which order the sides are measured, and how many sequences each block trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm

_LONGEST_UNIT = 8  # times the largest global batch: a block that holds whole steps of every side must stay short


def interleave(num_sides: int, repeats: int) -> tuple[tuple[int, ...], ...]:
    """Rounds, each with every side once: A B, B A, A B, … What drifts with time meets all of them alike."""
    forward = tuple(range(num_sides))
    return tuple(forward if number % 2 == 0 else forward[::-1] for number in range(repeats))


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """What a block trains: the same sequences on every side, whatever number of them makes a step there."""

    warm_sequences: int
    timed_sequences: int
    is_exact: bool  # both are whole steps of every side

    def count_steps(self, global_batch_size: int) -> tuple[int, int]:
        """Warm ones, and those that are timed."""
        return ceil(self.warm_sequences / global_batch_size), ceil(self.timed_sequences / global_batch_size)


def make_course(global_batch_sizes: Sequence[int], warm_steps: int, timed_steps: int) -> Course:
    """Steps are counted by the side with the largest global batch; the others make more of them."""
    largest = max(global_batch_sizes)
    unit = lcm(*global_batch_sizes)
    is_exact = unit <= _LONGEST_UNIT * largest
    unit = unit if is_exact else largest
    return Course(
        warm_sequences=ceil(warm_steps * largest / unit) * unit,
        timed_sequences=ceil(timed_steps * largest / unit) * unit,
        is_exact=is_exact,
    )
