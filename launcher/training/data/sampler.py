"""Which pack is trained in which step, and on which rank. The order depends on the seed alone, not on the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from launcher.corpus.epoch_order import make_epoch_order, make_grouped_order
from launcher.training.data.collate import IntArray

Slots = tuple[int | None, ...]  # packs of one micro-batch; None: an empty slot


@dataclass(kw_only=True)
class PackSampler:
    """Sampler without replacement: each step trains the next packs of its epoch's seeded permutation."""

    num_packs: int
    global_batch_size: int
    seed: int
    lengths: npt.NDArray[np.int32] | None = None  # of packs, to group them by length
    _epoch: int = field(default=-1, init=False)
    _permutation: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), init=False)

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch, the last one possibly smaller."""
        return -(-self.num_packs // self.global_batch_size)

    def packs_for_step(self, step: int) -> tuple[int, ...]:
        """Return the packs of a step, counted from 0; the last step of an epoch may have fewer."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._permute(epoch)
        begin = step_in_epoch * self.global_batch_size
        return tuple(self._permutation[begin : begin + self.global_batch_size].tolist())

    def _permute(self, epoch: int) -> IntArray:
        if self.lengths is not None:
            return make_grouped_order(self.lengths, self.global_batch_size, self.seed, epoch)
        return make_epoch_order(self.num_packs, self.seed, epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLayout:
    """Division of a global batch into ranks x micro-batches x slots, each of which holds at most one pack."""

    num_ranks: int
    micro_batch_size: int
    num_micro_batches: int

    @property
    def slots_per_rank(self) -> int:
        """Packs that one rank can hold per step."""
        return self.micro_batch_size * self.num_micro_batches

    def shrink_to(self, num_packs: int) -> BatchLayout:
        """Return the layout with the fewest micro-batches that hold `num_packs`, so that none is empty on all ranks."""
        needed = -(-num_packs // (self.num_ranks * self.micro_batch_size))
        return replace(self, num_micro_batches=max(1, min(needed, self.num_micro_batches)))


def assign_to_ranks(packs: Sequence[int], costs: IntArray, layout: BatchLayout) -> list[tuple[Slots, ...]]:
    """Return the micro-batches of each rank, balanced by the sum of squared lengths, which is attention's cost.

    Empty slots train no token. The result is still exact, because the loss is a sum divided by a token count.
    """
    assigned: list[list[int | None]] = [[] for _ in range(layout.num_ranks)]
    loads = [0] * layout.num_ranks
    for pack in sorted(packs, key=lambda pack: (-int(costs[pack]), pack)):
        free = (rank for rank in range(layout.num_ranks) if len(assigned[rank]) < layout.slots_per_rank)
        rank = min(free, key=lambda rank: (loads[rank], len(assigned[rank]), rank))
        assigned[rank].append(pack)
        loads[rank] += int(costs[pack])
    return [_split(packs_of_rank, layout) for packs_of_rank in assigned]


def _split(packs: list[int | None], layout: BatchLayout) -> tuple[Slots, ...]:
    """Split packs into micro-batches round-robin, so that the micro-batches of a rank have similar costs, too."""
    padded = packs + [None] * (layout.slots_per_rank - len(packs))
    return tuple(tuple(padded[index :: layout.num_micro_batches]) for index in range(layout.num_micro_batches))
