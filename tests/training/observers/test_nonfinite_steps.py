"""Steps with non-finite loss or gradients are skipped and reported; too many in a row end the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.core import metrics
from launcher.core.errors import RunFailedError
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.data.collate import PackedBatch
from launcher.training.engine.engine import Engine
from launcher.training.engine.optimizer import unwrap_optimizer
from launcher.training.engine.run import TrainingRun
from launcher.training.loop import train
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.metrics_writer import MetricsWriter
from launcher.training.observers.nonfinite_steps import NonfiniteSteps
from tests.training.builders import Recorder, build, trained_weights, vary, with_engine

POISONED: set[int] = set()
_seen: list[int] = []


class PoisonedEngine(Engine):
    """Makes the loss of these steps, counted from 1, NaN, and so their gradients."""

    def micro_step(self, batch: PackedBatch, num_trained: int, *, is_last: bool) -> Tensor:
        _seen.append(len(_seen) + 1)
        poison = float("nan") if _seen[-1] in POISONED else 1.0
        with self._accumulate(is_last):
            loss: Tensor = self.model(batch) / num_trained * poison
            self.accelerator.backward(loss * self._backward_scale)
        return loss.detach()


class Weights(Observer):
    """Records the trained weights after every step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}
        self.counts: dict[int, float] = {}

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        self.after[metrics.step] = {name: weight.clone() for name, weight in trained_weights(run).items()}
        states: Any = unwrap_optimizer(run.engine.optimizer).state
        self.counts[metrics.step] = max((float(state.get("step", 0)) for state in states.values()), default=0.0)


def train_poisoned(
    plan: Plan, store: Store, root: Path, steps: set[int], **changes: Any
) -> tuple[TrainingRun, Recorder, Weights]:
    # Saved at every step, so that each is reported before the next one is trained.
    varied = vary(plan, {"schedule.max_steps": 6, "schedule.save_every_steps": 1, **changes})
    run = with_engine(build(varied, store, root), PoisonedEngine)
    POISONED.clear()
    POISONED.update(steps)
    _seen.clear()
    recorder, weights = Recorder(), Weights()
    train(run, Observers([MetricsWriter(), recorder, weights, NonfiniteSteps()]))
    return run, recorder, weights


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_a_skipped_step_changes_nothing(
    plan: Plan, store: Store, tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"optimizer.name": optimizer}
    run, recorder, weights = train_poisoned(plan, store, tmp_path, {3}, **changes)
    assert [step.step for step in recorder.steps] == [1, 2, 3, 4, 5, 6], "the run continues"
    assert [step.values[metrics.SKIPPED] for step in recorder.steps] == [0, 0, 1, 0, 0, 0]
    before, after = weights.after[2], weights.after[3]
    assert all(torch.equal(before[name], after[name]) for name in before), "not by a bit"
    assert any(not torch.equal(after[name], weights.after[4][name]) for name in after), "the next step counts again"
    assert all(torch.isfinite(weight).all() for weight in weights.after[6].values())
    if optimizer != "sgd":
        assert [weights.counts[step] for step in range(1, 7)] == [1, 2, 2, 3, 4, 5], "the optimizer counts five"
    console = capsys.readouterr().err
    rows = sorted({int(row) for pack in recorder.steps[2].packs for row in run.train.file[pack].rows})
    assert "warning: step 3: the loss is nan; step skipped." in console
    assert f"Its rows: {', '.join(map(str, rows))}" in console
    written = load_metrics(run.paths.metrics)
    assert math.isnan(written[2].values[metrics.TRAIN_LOSS]), "never hidden"
    assert "NaN" not in run.paths.metrics.read_text(), "and still JSON"


def test_steps_before_a_skipped_one_are_unchanged(plan: Plan, store: Store, tmp_path: Path) -> None:
    """The steps before it equal those of an undisturbed run."""
    _, poisoned, _ = train_poisoned(plan, store, tmp_path / "poisoned", {4})
    _, clean, _ = train_poisoned(plan, store, tmp_path / "clean", set())
    assert poisoned.losses[:3] == clean.losses[:3]
    assert poisoned.losses[4] != clean.losses[4]


def test_too_many_in_a_row_end_the_run(plan: Plan, store: Store, tmp_path: Path) -> None:
    changes = {"guards.max_nonfinite_steps": 2}
    with pytest.raises(RunFailedError, match=r"in 3 consecutive steps \(last: 5\)") as failed:
        train_poisoned(plan, store, tmp_path, {3, 4, 5}, **changes)
    assert "no checkpoint was saved before" in failed.value.title
    assert "learning_rate" in failed.value.hint


def test_separate_nonfinite_steps_do_not_end_the_run(plan: Plan, store: Store, tmp_path: Path) -> None:
    _, recorder, _ = train_poisoned(plan, store, tmp_path, {1, 3, 5}, **{"guards.max_nonfinite_steps": 1})
    assert len(recorder.steps) == 6
    assert sum(step.values[metrics.SKIPPED] for step in recorder.steps) == 3


def test_loss_scaling_may_overflow(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Loss scaling finds its scale by skipped steps; a non-finite loss still counts."""
    run = build(vary(plan, {"precision.loss_scaling": True, "guards.max_nonfinite_steps": 0}), store, tmp_path)
    observer = NonfiniteSteps()
    values = {metrics.TRAIN_LOSS: 2.0, metrics.GRAD_NORM: math.inf, metrics.SKIPPED: 1.0}
    observer.on_step(run, StepMetrics(step=1, epoch=0.0, values=values, packs=(0,)))
    with pytest.raises(RunFailedError, match="training diverged"):
        observer.on_step(run, StepMetrics(step=2, epoch=0.0, values={**values, metrics.TRAIN_LOSS: math.nan}))


def tell(run: TrainingRun, losses: list[float]) -> None:
    observer = NonfiniteSteps()
    for step, loss in enumerate(losses, 1):
        values = {metrics.TRAIN_LOSS: loss, metrics.GRAD_NORM: 1.0, metrics.SKIPPED: 0.0}
        observer.on_step(run, StepMetrics(step=step, epoch=0.0, values=values, packs=(0, 1)))


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.0 - 0.01 * i for i in range(20)] + [3.5], 21),
        ([2.0 + 0.1 * (i % 3) for i in range(20)] + [2.4], None),  # within its usual ups and downs
        ([2.0] * 10 + [9.0], None),  # too early to tell
        ([5.0 * 0.9**i for i in range(40)], None),  # it falls
        ([2.0] * 20 + [2.1], None),  # no spread at all, and hardly a jump
    ],
)
def test_a_loss_spike_is_reported(
    plan: Plan, store: Store, tmp_path: Path, losses: list[float], step: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(plan, store, tmp_path)
    capsys.readouterr()
    tell(run, losses)
    console = capsys.readouterr().err
    if step is None:
        assert "spike" not in console
    else:
        assert f"step {step}: loss spike from" in console
        assert "Its rows: " in console
