"""Which pack is trained when, and by which rank. It depends on the seed alone; ranks only share the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from launcher.corpus.order import epoch_order, grouped_order
from launcher.training.batches import Numbers

Slots = tuple[int | None, ...]  # packs of one micro-batch; None: an empty slot


@dataclass(kw_only=True)
class StepOrder:
    """Step s of the run, from 0, trains the next packs of its epoch's permutation: the same on any hardware."""

    num_packs: int
    global_batch_size: int
    seed: int
    lengths: npt.NDArray[np.int32] | None = None  # of packs, where rows of like length shall stand together
    _epoch: int = field(default=-1, init=False)
    _permutation: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64), init=False)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_packs // self.global_batch_size)

    def packs_of(self, step: int) -> tuple[int, ...]:
        """The last step of an epoch may have fewer than the others."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._permute(epoch)
        begin = inside * self.global_batch_size
        return tuple(self._permutation[begin : begin + self.global_batch_size].tolist())

    def _permute(self, epoch: int) -> Numbers:
        if self.lengths is not None:
            return grouped_order(self.lengths, self.global_batch_size, self.seed, epoch)
        return epoch_order(self.num_packs, self.seed, epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hands:
    """How the packs of a step are dealt: to so many ranks, each with so many micro-batches of so many slots."""

    num_ranks: int
    micro_batch_size: int
    num_micro_batches: int

    @property
    def slots_per_rank(self) -> int:
        return self.micro_batch_size * self.num_micro_batches

    def for_packs(self, num_packs: int) -> Hands:
        """As few micro-batches as hold them: none that would be empty on every rank."""
        needed = -(-num_packs // (self.num_ranks * self.micro_batch_size))
        return replace(self, num_micro_batches=max(1, min(needed, self.num_micro_batches)))


def deal(packs: Sequence[int], costs: Numbers, hands: Hands) -> list[tuple[Slots, ...]]:
    """For each rank its micro-batches. Packs go to ranks so that the sum of squared lengths, attention's cost, is even.

    What is left over are empty slots, which train no token: exact, because the loss is a sum divided by a count.
    """
    held: list[list[int | None]] = [[] for _ in range(hands.num_ranks)]
    loads = [0] * hands.num_ranks
    for pack in sorted(packs, key=lambda pack: (-int(costs[pack]), pack)):
        free = (rank for rank in range(hands.num_ranks) if len(held[rank]) < hands.slots_per_rank)
        rank = min(free, key=lambda rank: (loads[rank], len(held[rank]), rank))
        held[rank].append(pack)
        loads[rank] += int(costs[pack])
    return [_cut(hand, hands) for hand in held]


def _cut(hand: list[int | None], hands: Hands) -> tuple[Slots, ...]:
    """Dealt in turn, so that the micro-batches of a rank are of like cost too."""
    padded = hand + [None] * (hands.slots_per_rank - len(hand))
    return tuple(tuple(padded[index :: hands.num_micro_batches]) for index in range(hands.num_micro_batches))
