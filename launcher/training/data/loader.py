"""The DataLoader: micro-batches in the order of the run, collated by workers ahead of the GPU."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from launcher.corpus.pack_file import PackFile
from launcher.plan.model import LoaderPlan
from launcher.training.data.collate import BatchShape, IntArray, PackedBatch, collate
from launcher.training.data.sampler import BatchLayout, PackSampler, assign_to_ranks


@dataclass(kw_only=True)
class MicroBatchDataset(Dataset[PackedBatch]):
    """Dataset of this rank's micro-batches in the complete run, so that a resumed run starts at a later index."""

    file: PackFile
    costs: IntArray
    sampler: PackSampler
    layout: BatchLayout
    rank: int
    shape: BatchShape
    num_steps: int

    def __len__(self) -> int:
        return self.first_index(self.num_steps)

    def __getitem__(self, index: int) -> PackedBatch:
        step, micro_step = self._locate(index)
        packs = self.sampler.packs_for_step(step)
        slots = assign_to_ranks(packs, self.costs, self.layout.shrink_to(len(packs)))[self.rank][micro_step]
        return collate([None if slot is None else self.file[slot] for slot in slots], self.shape)

    def count_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step; the last step of an epoch may have fewer."""
        is_last = (step + 1) % self.sampler.steps_per_epoch == 0
        return self._per_last_step if is_last else self._per_step

    def first_index(self, step: int) -> int:
        """Return the index of a step's first micro-batch."""
        epoch, step_in_epoch = divmod(step, self.sampler.steps_per_epoch)
        return epoch * self._per_epoch + step_in_epoch * self._per_step

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the step of the micro-batch with this index, and its number within the step."""
        epoch, rest = divmod(index, self._per_epoch)
        step_in_epoch = min(rest // self._per_step, self.sampler.steps_per_epoch - 1)
        return epoch * self.sampler.steps_per_epoch + step_in_epoch, rest - step_in_epoch * self._per_step

    @property
    def _per_epoch(self) -> int:
        return (self.sampler.steps_per_epoch - 1) * self._per_step + self._per_last_step

    @property
    def _per_step(self) -> int:
        return self.layout.shrink_to(self.sampler.global_batch_size).num_micro_batches

    @property
    def _per_last_step(self) -> int:
        num_packs = self.sampler.num_packs - (self.sampler.steps_per_epoch - 1) * self.sampler.global_batch_size
        return self.layout.shrink_to(num_packs).num_micro_batches


class PrefetchIterator(Iterator[PackedBatch]):
    """Iterator over micro-batches. Without workers, this process collates the next one while the device computes."""

    def __init__(self, batches: Iterator[PackedBatch], *, prefetches: bool) -> None:
        self._batches, self._prefetches = batches, prefetches
        self._next: PackedBatch | None = None

    def __next__(self) -> PackedBatch:
        batch, self._next = self._next, None
        return next(self._batches) if batch is None else batch

    def prefetch_next(self) -> None:
        """Collate the next micro-batch, if there is one. Call after launching work on the device."""
        if self._prefetches and self._next is None:
            self._next = next(self._batches, None)


def build_loader(
    batches: MicroBatchDataset, plan: LoaderPlan, first_step: int = 0, *, prefetch: bool = False
) -> PrefetchIterator:
    """Return an iterator over micro-batches from `first_step` on. `prefetch` enables prefetch_next without workers."""
    loader: DataLoader[PackedBatch] = DataLoader(
        batches,
        batch_size=None,
        sampler=range(batches.first_index(first_step), len(batches)),
        num_workers=plan.num_workers,
        prefetch_factor=plan.prefetch_factor,
        pin_memory=plan.pin_memory,
        persistent_workers=plan.persistent_workers,
        worker_init_fn=_ignore_signals if plan.num_workers else None,
        generator=torch.Generator(),  # else the workers' seed is drawn from the training's RNG
    )
    return PrefetchIterator(iter(loader), prefetches=prefetch and plan.num_workers == 0)


def _ignore_signals(_worker: int) -> None:
    """Ignore SIGINT, SIGTERM and SIGUSR1 in a worker: a killed worker would turn a requested stop into an error.

    Workers end with the training anyway.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def iterate_eval_batches(
    file: PackFile, costs: IntArray, shape: BatchShape, rank: int, num_ranks: int
) -> Iterator[PackedBatch]:
    """Iterate over this rank's share of a split. Every rank gets the same number of micro-batches."""
    per_rank = -(-len(file) // num_ranks)
    layout = BatchLayout(
        num_ranks=num_ranks,
        micro_batch_size=shape.micro_batch_size,
        num_micro_batches=-(-per_rank // shape.micro_batch_size),
    )
    for slots in assign_to_ranks(range(len(file)), costs, layout)[rank]:
        yield collate([None if slot is None else file[slot] for slot in slots], shape)
