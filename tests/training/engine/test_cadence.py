"""Evaluation and saving are due at their intervals, and the loop runs them then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.core import metrics
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.checkpoint.progress import TrainProgress
from launcher.training.engine.run import TrainingRun
from launcher.training.evaluation.heldout_loss import Evaluator
from launcher.training.loop import train
from launcher.training.observers.base import Observers
from tests.training.builders import (
    Recorder,
    build,
    make_documents,
    make_uneven_packs,
    pack_greedily,
    split,
    vary,
    write_store,
)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(
        tmp_path_factory.mktemp("held_out"), make_uneven_packs(), pack_greedily(make_documents(9, seed=21))
    )


@pytest.mark.parametrize(
    ("num_steps", "steps", "epochs", "due"),
    [
        (7, None, None, []),
        (7, 3, None, [3, 6, 7]),  # the last step too
        (6, 3, None, [3, 6]),
        (5, 100, None, [5]),
        (7, None, 1.0, [3, 6, 7]),  # three steps an epoch
        (13, None, 2.0, [6, 12, 13]),
        (6, None, 0.5, [2, 3, 5, 6]),  # after step 1.5, so at the end of step 2
        (4, None, 0.01, [1, 2, 3, 4]),  # more often than steps: after each, once
        (9, None, 1.5, [5, 9]),
    ],
)
def test_is_due(
    plan: Plan, store: Store, tmp_path: Path, num_steps: int, steps: int | None, epochs: float | None, due: list[int]
) -> None:
    run = replace(build(plan, store, tmp_path), num_steps=num_steps)
    assert run.steps_per_epoch == 3
    assert [step for step in range(1, num_steps + 1) if run.is_due(step, steps, epochs)] == due


class Diary(Recorder):
    """Records events in order."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[str] = []

    def on_start(self, run: TrainingRun, step: int) -> None:  # noqa: ARG002
        self.entries.append("start")

    def on_step(self, run: TrainingRun, metrics: metrics.StepMetrics) -> None:
        super().on_step(run, metrics)
        self.entries.append(f"step {metrics.step}")

    def on_evaluation(self, run: TrainingRun, metrics: metrics.StepMetrics) -> bool:
        self.entries.append(f"evaluation {metrics.step}")
        return super().on_evaluation(run, metrics)

    def on_save(self, run: TrainingRun, position: TrainProgress) -> None:  # noqa: ARG002
        self.entries.append(f"save {position.step}")

    def on_end(self, run: TrainingRun, step: int) -> None:  # noqa: ARG002
        self.entries.append(f"end {step}")


def keep_diary(plan: Plan, store: Store, root: Path, **changes: Any) -> Diary:
    varied = vary(plan, {f"schedule.{key}": value for key, value in changes.items()})
    diary = Diary()
    train(build(varied, store, root), Observers([diary]))
    return diary


def test_a_step_is_reported_before_its_evaluation(plan: Plan, held_out: Store, tmp_path: Path) -> None:
    diary = keep_diary(plan, held_out, tmp_path, max_steps=4, evaluate_every_steps=2, save_every_steps=3)
    assert diary.entries == [
        *("start", "step 1", "step 2", "evaluation 2", "step 3", "save 3"),
        *("step 4", "evaluation 4", "save 4", "end 4"),
    ]


def test_intervals_in_epochs(plan: Plan, held_out: Store, tmp_path: Path) -> None:
    diary = keep_diary(plan, held_out, tmp_path, epochs=2.5, evaluate_every_epochs=1.0, save_every_epochs=2.0)
    assert [entry for entry in diary.entries if not entry.startswith("step")] == [
        *("start", "evaluation 3", "evaluation 6", "save 6", "evaluation 8", "save 8", "end 8")
    ]


def test_without_intervals_nothing_is_due(plan: Plan, held_out: Store, tmp_path: Path) -> None:
    diary = keep_diary(plan, held_out, tmp_path, max_steps=2)
    assert diary.entries == ["start", "step 1", "step 2", "end 2"]


def test_evaluation_does_not_disturb_training(plan: Plan, held_out: Store, tmp_path: Path) -> None:
    """Evaluation draws no random numbers and restores training mode, so losses with dropout are bit-exact."""
    dropping = vary(plan, {"adapter.dropout": 0.3})
    without = keep_diary(dropping, held_out, tmp_path, max_steps=5)
    within = keep_diary(dropping, held_out, tmp_path, max_steps=5, evaluate_every_steps=1)
    assert within.losses == without.losses
    assert len(within.evaluations) == 5


@pytest.mark.parametrize("eval_batch_size", [1, 2, 5])
def test_the_validation_loss_is_a_mean_over_tokens(
    plan: Plan, held_out: Store, tmp_path: Path, eval_batch_size: int
) -> None:
    """For any batch size, compared with the sum and count of each pack."""
    run = build(vary(plan, {"batch.eval_batch_size": eval_batch_size, **split(1, 4)}), held_out, tmp_path)
    assert run.validation is not None
    alone = build(vary(plan, {"batch.eval_batch_size": 1}), held_out, tmp_path)
    total, count = 0.0, 0
    from launcher.training.data.collate import collate

    assert alone.validation is not None
    with alone.engine.eval_mode():
        for pack in run.validation.file:
            total += float(alone.engine.model(collate([pack], alone.validation.shape)))
            count += int(np.sum(pack.trained))
    values = Evaluator(run).evaluate(1)
    assert values is not None
    assert values[metrics.EVAL_LOSS] == pytest.approx(total / count, rel=1e-6)  # fp32 sums in another order
    assert run.engine.model.training
    assert torch.is_grad_enabled()


def test_without_a_validation_split_there_is_no_loss(plan: Plan, store: Store, tmp_path: Path) -> None:
    diary = keep_diary(plan, store, tmp_path, max_steps=2, evaluate_every_steps=1)
    assert [entry.values for entry in diary.evaluations] == [{}, {}]
