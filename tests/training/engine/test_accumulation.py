"""How a global batch is cut into micro-batches does not change what is learnt: 4 x 1 = 2 x 2 = 1 x 4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from launcher.core import metrics
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.data.collate import PackedBatch, collate
from launcher.training.engine.engine import Engine
from tests.training.builders import (
    Recorder,
    build,
    moved_difference,
    split,
    train_recorded,
    trained_weights,
    vary,
    with_engine,
)

# Sums of some 100 fp32 numbers in another order: units in the last place (6e-8), grown over six steps. Seen: 3e-7.
LOSS_TOLERANCE = 1e-6
# Of the way that the weights came. Adam divides each gradient by its own size, so rounding of the smallest ones shows.
# Seen: 6e-6.
WEIGHT_TOLERANCE = 1e-4

Trained = tuple[Recorder, dict[str, Tensor], dict[str, Tensor]]


class MeanOfMeans(Engine):
    """What must not be: each micro-batch divided by its own count, and the mean taken of those."""

    num_micro_batches = 4

    def micro_step(self, batch: PackedBatch, num_trained: int, *, is_last: bool) -> Tensor:  # noqa: ARG002
        return super().micro_step(batch, max(1, len(batch.targets)) * self.num_micro_batches, is_last=is_last)


def train_split(
    plan: Plan, store: Store, root: Path, micro: int, accumulation: int, engine: type[Engine] = Engine
) -> Trained:
    run = with_engine(build(vary(plan, split(micro, accumulation)), store, root), engine)
    begin = trained_weights(run)
    return train_recorded(run), trained_weights(run), begin


@pytest.fixture(scope="module")
def whole(plan: Plan, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two epochs of three steps; the last of each has two packs and two empty slots."""
    return train_split(plan, store, tmp_path_factory.mktemp("whole"), 4, 1)


@pytest.mark.parametrize(("micro", "accumulation"), [(2, 2), (1, 4), (3, 2), (1, 7)])
def test_every_split_trains_the_same(
    whole: Trained, plan: Plan, store: Store, tmp_path: Path, micro: int, accumulation: int
) -> None:
    recorder, weights, _ = train_split(plan, store, tmp_path, micro, accumulation)
    reference, reference_weights, begin = whole
    assert [len(step.packs) for step in recorder.steps] == [4, 4, 2, 4, 4, 2]
    assert [step.packs for step in recorder.steps] == [step.packs for step in reference.steps]
    assert recorder.losses == pytest.approx(reference.losses, rel=LOSS_TOLERANCE)
    norms = recorder.values(metrics.GRAD_NORM)
    assert norms == pytest.approx(reference.values(metrics.GRAD_NORM), rel=LOSS_TOLERANCE)
    assert moved_difference(weights, reference_weights, begin) < WEIGHT_TOLERANCE


def test_a_mean_of_means_would_be_seen(whole: Trained, plan: Plan, store: Store, tmp_path: Path) -> None:
    """The packs are uneven enough for the test above to fail where a mean of means is taken."""
    recorder, weights, begin = train_split(plan, store, tmp_path, 1, 4, MeanOfMeans)
    reference, reference_weights, _ = whole
    wrong = [abs(ours - theirs) / theirs for ours, theirs in zip(recorder.losses, reference.losses, strict=True)]
    assert max(wrong) > 1000 * LOSS_TOLERANCE
    assert moved_difference(weights, reference_weights, begin) > 1000 * WEIGHT_TOLERANCE


def test_an_empty_slot_leaves_no_trace(plan: Plan, store: Store, tmp_path: Path) -> None:
    """A micro-batch of empty slots alone: loss zero, gradients zero, and neither is missing nor not-a-number."""
    run = build(vary(plan, split(1, 4)), store, tmp_path)
    loss = run.engine.micro_step(collate([None], run.train.shape), 5, is_last=True)
    assert float(loss) == 0.0
    for parameter in run.engine.trained_parameters():
        assert parameter.grad is not None
        assert torch.count_nonzero(parameter.grad) == 0
