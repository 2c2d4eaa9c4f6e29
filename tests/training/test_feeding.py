"""Micro-batches come in the order of the run, from any step on, whoever makes them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from launcher.corpus.store import Store
from launcher.plan.model import LoaderPlan, Plan
from launcher.training.batches import PackedBatch
from launcher.training.clock import StepClock
from launcher.training.feeding import Feed, evaluation_batches, feed
from launcher.training.loop import train_step
from launcher.training.run import Run
from tests.training.builders import build, split, vary

NO_WORKERS = LoaderPlan(num_workers=0, prefetch_factor=None, pin_memory=False, persistent_workers=False)


@pytest.fixture
def run(plan: Plan, store: Store, tmp_path: Path) -> Run:
    return build(vary(plan, split(2, 2)), store, tmp_path)


def same(left: PackedBatch, right: PackedBatch) -> bool:
    tensors = [(getattr(left, name), getattr(right, name)) for name in ("input_ids", "cu_seqlens", "targets")]
    return all(torch.equal(ours, theirs) for ours, theirs in tensors) and left.max_length == right.max_length


def test_from_a_step_on_is_the_tail_of_the_whole(run: Run) -> None:
    batches = run.batches()
    whole = list(feed(batches, NO_WORKERS))
    assert len(whole) == sum(run.count_micro_batches(step) for step in range(run.num_steps)) == 10
    for first in range(run.num_steps + 1):
        tail = list(feed(batches, NO_WORKERS, first_step=first))
        rest = whole[batches.first_of(first) :]
        assert all(same(ours, theirs) for ours, theirs in zip(tail, rest, strict=True))


def test_workers_keep_the_order(run: Run) -> None:
    workers = LoaderPlan(num_workers=2, prefetch_factor=2, pin_memory=False, persistent_workers=False)
    whole = list(feed(run.batches(), NO_WORKERS))
    made = list(feed(run.batches(), workers))
    assert all(same(ours, theirs) for ours, theirs in zip(made, whole, strict=True))


def test_what_is_prepared_is_next(run: Run) -> None:
    whole, batches = list(feed(run.batches(), NO_WORKERS)), feed(run.batches(), NO_WORKERS, is_beside=True)
    made = []
    for _ in whole:
        made.append(next(batches))
        for _ in range(len(made) % 3):  # not at all, once, twice
            batches.prepare()
    assert all(same(ours, theirs) for ours, theirs in zip(made, whole, strict=True))
    batches.prepare()  # there is none left
    assert next(batches, None) is None


@pytest.mark.parametrize("prepares", [True, False])
def test_a_step_prepares_what_comes_next(run: Run, prepares: bool) -> None:
    """A CPU would only do it elsewhere, a worker does it anyway."""
    given = iter(feed(run.batches(), NO_WORKERS))
    whole, in_step = list(feed(run.batches(), NO_WORKERS)), run.count_micro_batches(0)
    train_step(run, 1, Feed(given, prepares=prepares), StepClock(run.engine.device))
    assert same(next(given), whole[in_step + prepares])


def test_only_what_no_worker_makes_is_prepared_and_only_beside_a_device(run: Run) -> None:
    workers = LoaderPlan(num_workers=1, prefetch_factor=1, pin_memory=False, persistent_workers=False)
    for plan, is_beside, prepares in ((NO_WORKERS, True, True), (NO_WORKERS, False, False), (workers, True, False)):
        assert feed(run.batches(), plan, is_beside=is_beside)._prepares is prepares


def test_each_step_feeds_its_packs(run: Run) -> None:
    batches = run.batches()
    for step in range(run.num_steps):
        packs = run.order.packs_of(step)
        first = batches.first_of(step)
        fed = [batches[first + index] for index in range(run.count_micro_batches(step))]
        assert all(len(batch.targets) for batch in fed), "none is empty"
        assert sum(len(batch.targets) for batch in fed) == int(run.train.num_trained[list(packs)].sum())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_evaluation_sees_every_pack_once(run: Run, num_ranks: int) -> None:
    """And every rank as many micro-batches: none waits for another in vain."""
    train = run.train
    fed = [list(evaluation_batches(train.file, train.costs, train.shape, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in fed}) == 1
    targets = sorted(token for batches in fed for batch in batches for token in batch.targets.tolist())
    wanted = sorted(token for pack in train.file for token in pack.input_ids[pack.trained == 1].tolist())
    assert targets == wanted


def test_workers_leave_signals_to_the_training(run: Run) -> None:
    """A launcher that stops a run at once signals all its processes; a worker that died would be told as our bug."""
    workers = LoaderPlan(num_workers=1, prefetch_factor=1, pin_memory=False, persistent_workers=False)
    batches = feed(run.batches(), workers)
    made = [next(batches)]
    for child in multiprocessing.active_children():
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            os.kill(child.pid or 0, number)
    made += list(batches)
    assert len(made) == 10
