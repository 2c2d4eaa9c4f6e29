"""The data loader: micro-batches in the order of the run, made by workers ahead of the GPU."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from launcher.corpus.packs import PackFile
from launcher.plan.model import LoaderPlan
from launcher.training.batches import Numbers, PackedBatch, Shape, collate
from launcher.training.dealing import Hands, StepOrder, deal


@dataclass(kw_only=True)
class TrainingBatches(Dataset[PackedBatch]):
    """Micro-batch i of this rank, counted over the whole run: where to begin is one number."""

    file: PackFile
    costs: Numbers
    order: StepOrder
    hands: Hands
    rank: int
    shape: Shape
    num_steps: int

    def __len__(self) -> int:
        return self.first_of(self.num_steps)

    def __getitem__(self, index: int) -> PackedBatch:
        step, micro_step = self._locate(index)
        packs = self.order.packs_of(step)
        slots = deal(packs, self.costs, self.hands.for_packs(len(packs)))[self.rank][micro_step]
        return collate([None if slot is None else self.file[slot] for slot in slots], self.shape)

    def count_micro_batches(self, step: int) -> int:
        """The last step of an epoch may have fewer."""
        is_last = (step + 1) % self.order.steps_per_epoch == 0
        return self._in_last if is_last else self._in_step

    def first_of(self, step: int) -> int:
        """The number of a step's first micro-batch."""
        epoch, inside = divmod(step, self.order.steps_per_epoch)
        return epoch * self._in_epoch + inside * self._in_step

    def _locate(self, index: int) -> tuple[int, int]:
        epoch, rest = divmod(index, self._in_epoch)
        inside = min(rest // self._in_step, self.order.steps_per_epoch - 1)
        return epoch * self.order.steps_per_epoch + inside, rest - inside * self._in_step

    @property
    def _in_epoch(self) -> int:
        return (self.order.steps_per_epoch - 1) * self._in_step + self._in_last

    @property
    def _in_step(self) -> int:
        return self.hands.for_packs(self.order.global_batch_size).num_micro_batches

    @property
    def _in_last(self) -> int:
        left = self.order.num_packs - (self.order.steps_per_epoch - 1) * self.order.global_batch_size
        return self.hands.for_packs(left).num_micro_batches


class Feed(Iterator[PackedBatch]):
    """Micro-batches. Without workers nobody makes the next one meanwhile, but whoever has launched a micro-step on a
    device has time for it."""

    def __init__(self, batches: Iterator[PackedBatch], *, prepares: bool) -> None:
        self._batches, self._prepares = batches, prepares
        self._next: PackedBatch | None = None

    def __next__(self) -> PackedBatch:
        made, self._next = self._next, None
        return next(self._batches) if made is None else made

    def prepare(self) -> None:
        """The next one, if there is any, beside what the device does."""
        if self._prepares and self._next is None:
            self._next = next(self._batches, None)


def feed(batches: TrainingBatches, plan: LoaderPlan, first_step: int = 0, *, is_beside: bool = False) -> Feed:
    """From a step on, to the end of the run. `is_beside`: what trains is not the CPU."""
    loader: DataLoader[PackedBatch] = DataLoader(
        batches,
        batch_size=None,
        sampler=range(batches.first_of(first_step), len(batches)),
        num_workers=plan.num_workers,
        prefetch_factor=plan.prefetch_factor,
        pin_memory=plan.pin_memory,
        persistent_workers=plan.persistent_workers,
        worker_init_fn=_leave_signals_to_the_training if plan.num_workers else None,
        generator=torch.Generator(),  # its seed for workers would else be drawn from the training's random numbers
    )
    return Feed(iter(loader), prepares=is_beside and plan.num_workers == 0)


def _leave_signals_to_the_training(_worker: int) -> None:
    """A terminal and a launcher signal all processes of a run. A worker that dies of it is an error in the training,
    which would no longer end as one that was stopped; workers end with it anyway."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def evaluation_batches(
    file: PackFile, costs: Numbers, shape: Shape, rank: int, num_ranks: int
) -> Iterator[PackedBatch]:
    """All packs of a split, shared by the ranks. Every rank gets as many micro-batches as the others."""
    per_rank = -(-len(file) // num_ranks)
    hands = Hands(
        num_ranks=num_ranks,
        micro_batch_size=shape.micro_batch_size,
        num_micro_batches=-(-per_rank // shape.micro_batch_size),
    )
    for slots in deal(range(len(file)), costs, hands)[rank]:
        yield collate([None if slot is None else file[slot] for slot in slots], shape)
