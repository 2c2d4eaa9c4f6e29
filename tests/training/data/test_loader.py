"""The loader yields micro-batches in the order of the run, from any step, with or without workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from launcher.corpus.store import Store
from launcher.plan.model import LoaderPlan, Plan
from launcher.training.data.collate import PackedBatch
from launcher.training.data.loader import PrefetchIterator, build_loader, iterate_eval_batches
from launcher.training.engine.run import TrainingRun
from launcher.training.loop import train_step
from launcher.training.monitoring.step_timer import StepTimer
from tests.training.builders import build, split, vary

NO_WORKERS = LoaderPlan(num_workers=0, prefetch_factor=None, pin_memory=False, persistent_workers=False)


@pytest.fixture
def run(plan: Plan, store: Store, tmp_path: Path) -> TrainingRun:
    return build(vary(plan, split(2, 2)), store, tmp_path)


def same(left: PackedBatch, right: PackedBatch) -> bool:
    tensors = [(getattr(left, name), getattr(right, name)) for name in ("input_ids", "cu_seqlens", "targets")]
    return all(torch.equal(ours, theirs) for ours, theirs in tensors) and left.max_length == right.max_length


def test_starting_at_a_step_yields_the_remaining_batches(run: TrainingRun) -> None:
    batches = run.batches()
    whole = list(build_loader(batches, NO_WORKERS))
    assert len(whole) == sum(run.count_micro_batches(step) for step in range(run.num_steps)) == 10
    for first in range(run.num_steps + 1):
        tail = list(build_loader(batches, NO_WORKERS, first_step=first))
        rest = whole[batches.first_index(first) :]
        assert all(same(ours, theirs) for ours, theirs in zip(tail, rest, strict=True))


def test_workers_keep_the_order(run: TrainingRun) -> None:
    workers = LoaderPlan(num_workers=2, prefetch_factor=2, pin_memory=False, persistent_workers=False)
    whole = list(build_loader(run.batches(), NO_WORKERS))
    made = list(build_loader(run.batches(), workers))
    assert all(same(ours, theirs) for ours, theirs in zip(made, whole, strict=True))


def test_prefetched_batch_is_the_next_one(run: TrainingRun) -> None:
    whole, batches = (
        list(build_loader(run.batches(), NO_WORKERS)),
        build_loader(run.batches(), NO_WORKERS, prefetch=True),
    )
    made = []
    for _ in whole:
        made.append(next(batches))
        for _ in range(len(made) % 3):  # not at all, once, twice
            batches.prefetch_next()
    assert all(same(ours, theirs) for ours, theirs in zip(made, whole, strict=True))
    batches.prefetch_next()  # no batch is left
    assert next(batches, None) is None


@pytest.mark.parametrize("prefetches", [True, False])
def test_step_prefetches_the_next_batch(run: TrainingRun, prefetches: bool) -> None:
    """Not on a CPU, where it saves no time, and not with workers."""
    given = iter(build_loader(run.batches(), NO_WORKERS))
    whole, in_step = list(build_loader(run.batches(), NO_WORKERS)), run.count_micro_batches(0)
    train_step(run, 1, PrefetchIterator(given, prefetches=prefetches), StepTimer(run.engine.device))
    assert same(next(given), whole[in_step + prefetches])


def test_prefetch_requires_a_device_and_no_workers(run: TrainingRun) -> None:
    workers = LoaderPlan(num_workers=1, prefetch_factor=1, pin_memory=False, persistent_workers=False)
    for plan, prefetch, prefetches in ((NO_WORKERS, True, True), (NO_WORKERS, False, False), (workers, True, False)):
        assert build_loader(run.batches(), plan, prefetch=prefetch)._prefetches is prefetches


def test_each_step_yields_its_packs(run: TrainingRun) -> None:
    batches = run.batches()
    for step in range(run.num_steps):
        packs = run.order.packs_for_step(step)
        first = batches.first_index(step)
        fed = [batches[first + index] for index in range(run.count_micro_batches(step))]
        assert all(len(batch.targets) for batch in fed), "none is empty"
        assert sum(len(batch.targets) for batch in fed) == int(run.train.num_trained[list(packs)].sum())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_evaluation_sees_every_pack_once(run: TrainingRun, num_ranks: int) -> None:
    """Every rank has the same number of micro-batches, so that none waits forever."""
    train = run.train
    fed = [
        list(iterate_eval_batches(train.file, train.costs, train.shape, rank, num_ranks)) for rank in range(num_ranks)
    ]
    assert len({len(batches) for batches in fed}) == 1
    targets = sorted(token for batches in fed for batch in batches for token in batch.targets.tolist())
    wanted = sorted(token for pack in train.file for token in pack.input_ids[pack.trained == 1].tolist())
    assert targets == wanted


def test_workers_ignore_signals(run: TrainingRun) -> None:
    """All processes of a run are signalled; a dead worker would be reported as an error."""
    workers = LoaderPlan(num_workers=1, prefetch_factor=1, pin_memory=False, persistent_workers=False)
    batches = build_loader(run.batches(), workers)
    made = [next(batches)]
    for child in multiprocessing.active_children():
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            os.kill(child.pid or 0, number)
    made += list(batches)
    assert len(made) == 10
