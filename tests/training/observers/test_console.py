"""Lines of the console: the end of an epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.core import metrics as names
from launcher.core.metrics import StepMetrics, append_metrics
from launcher.training.observers import console as module
from launcher.training.observers.console import Console


def make_step(step: int, loss: float) -> StepMetrics:
    values = {
        names.STEP_SECONDS: 2.0,
        names.DATA_WAIT_SECONDS: 0.0,
        names.TOKENS_PER_SECOND: 1000.0,
        names.SAMPLES_PER_SECOND: 12.0,
        names.TRAIN_LOSS: loss,
    }
    return StepMetrics(step=step, epoch=step / 3, values=values)


def make_run(folder: Path, *, num_steps: int, steps_per_epoch: int) -> Any:
    return SimpleNamespace(
        engine=SimpleNamespace(is_main=True),
        plan=SimpleNamespace(
            expert="json",
            batch=SimpleNamespace(global_batch_size=8, sequence_length=64),
            schedule=SimpleNamespace(logging_steps=1000, evaluate_every_steps=2, evaluate_every_epochs=None),
        ),
        train=SimpleNamespace(file=range(24)),
        validation=None,
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        paths=SimpleNamespace(metrics=folder / "metrics.jsonl"),
        is_due=lambda step, every_steps, _every_epochs: step % every_steps == 0 or step == num_steps,
    )


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module.log, "info", found.append)
    return found


def epochs(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("epoch ")]


def test_every_epoch_ends_with_a_line(tmp_path: Path, lines: list[str]) -> None:
    run, console = make_run(tmp_path, num_steps=6, steps_per_epoch=3), Console()
    console.on_start(run, 0)
    for step, loss in enumerate((3.0, 2.0, 1.0, 0.5, float("nan"), 0.7), start=1):
        console.on_step(run, make_step(step, loss))
    run.num_steps = 5  # the last epoch is not complete
    console.on_step(run, make_step(3, 1.0))
    assert epochs(lines).pop().startswith("epoch 1/2 ")
    assert epochs(lines)[:-1] == [
        "epoch 1/2  mean loss 2.0000  6 s  12 rows/s",
        "epoch 2/2  mean loss 0.6000  6 s  12 rows/s",
    ]


def test_epoch_of_a_resumed_run_counts_earlier_steps(tmp_path: Path, lines: list[str]) -> None:
    run, console = make_run(tmp_path, num_steps=6, steps_per_epoch=3), Console()
    for step in (1, 2, 3, 4):
        append_metrics(run.paths.metrics, make_step(step, float(step)))
    append_metrics(run.paths.metrics, StepMetrics(step=4, epoch=1.3, values={names.EVAL_LOSS: 1.0}))
    console.on_start(run, 4)
    console.on_step(run, make_step(5, 5.0))
    console.on_step(run, make_step(6, 6.0))
    assert epochs(lines) == ["epoch 2/2  mean loss 5.0000  6 s  12 rows/s"]


def test_epochs_of_one_step_have_no_line(tmp_path: Path, lines: list[str]) -> None:
    run, console = make_run(tmp_path, num_steps=2, steps_per_epoch=1), Console()
    console.on_start(run, 0)
    console.on_step(run, make_step(1, 1.0))
    assert epochs(lines) == []


def test_remaining_time_includes_evaluations(tmp_path: Path, lines: list[str]) -> None:
    run, console = make_run(tmp_path, num_steps=5, steps_per_epoch=100), Console()
    run.plan.schedule.logging_steps = 1

    def evaluate(step: int, **seconds: float) -> None:
        values = {"eval/parses": 1.0, **{f"time/{name}": value for name, value in seconds.items()}}
        if "evaluation" in seconds:
            values[names.EVAL_LOSS] = 1.0
        console.on_evaluation(run, StepMetrics(step=step, epoch=0.1, values=values))

    console.on_start(run, 0)
    console.on_step(run, make_step(1, 1.0))
    evaluate(0, task_evaluation=30.0)
    console.on_step(run, make_step(2, 1.0))
    evaluate(2, task_evaluation=10.0, evaluation=5.0)
    for step in (3, 4, 5):
        console.on_step(run, make_step(step, 1.0))
    left = [line.split("  ")[-1] for line in lines if line.startswith("step ") and " left" in line]
    # two seconds per step; then with answers to one evaluation, then with two or one of 15 s
    assert left == ["8 s left", "36 s left", "34 s left", "32 s left", "15 s left"]
