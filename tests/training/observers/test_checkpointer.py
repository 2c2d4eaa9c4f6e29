"""A run saves its last or its best weights, and stops early if it does not improve."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launcher.core import metrics
from launcher.core.errors import RunFailedError
from launcher.core.metrics import StepMetrics
from launcher.corpus.store import Store
from launcher.plan.model import Plan, SchedulePlan
from launcher.runs.checkpoints import BestState
from launcher.training.checkpoint import snapshot
from launcher.training.checkpoint.progress import TrainProgress
from launcher.training.checkpoint.resume import ResumeOptions, resume_run
from launcher.training.checkpoint.weights import save_weights, write_exact_weights
from launcher.training.engine.run import TrainingRun
from launcher.training.evaluation.heldout_loss import Evaluator
from launcher.training.loop import train
from launcher.training.observers import checkpointer, metrics_writer
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.best_checkpoint import BestCheckpoint
from launcher.training.observers.checkpointer import Checkpointer
from launcher.training.observers.metrics_writer import MetricsWriter
from tests.training.builders import (
    Recorder,
    adapt,
    build,
    make_documents,
    make_uneven_packs,
    pack_greedily,
    trained_weights,
    vary,
    write_store,
)

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Both splits are noise: learning one makes the loss on the other worse eventually."""
    return write_store(
        tmp_path_factory.mktemp("held_out"), make_uneven_packs(), pack_greedily(make_documents(9, seed=21))
    )


class Scripted(Observer):
    """Replaces the loss of each evaluation before the other observers see it."""

    def __init__(self, values: dict[int, float]) -> None:
        self._values = values

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:  # noqa: ARG002
        metrics.values["eval/loss"] = self._values[metrics.step]
        return False


def train_scripted(
    plan: Plan, store: Store, root: Path, values: dict[int, float], **changes: Any
) -> tuple[TrainingRun, BestCheckpoint, Recorder, int]:
    schedule = {"max_steps": 6, "evaluate_every_steps": 1, "load_best_model_at_end": True, **changes}
    run = build(vary(plan, {f"schedule.{key}": value for key, value in schedule.items()}), store, root)
    best, recorder = BestCheckpoint(run.plan.schedule), Recorder()
    steps = train(run, Observers([Scripted(values), recorder, best, Checkpointer(best)]))
    return run, best, recorder, steps


def saved_steps(run: TrainingRun) -> list[int]:
    folder = run.paths.checkpoints
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir()) if folder.is_dir() else []


UP_DOWN = {1: 5.0, 2: 4.0, 3: 4.5, 4: 4.2, 5: 4.1, 6: 4.6}


def test_a_run_ends_with_its_best_weights(plan: Plan, held_out: Store, tmp_path: Path) -> None:
    run, best, _, steps = train_scripted(plan, held_out, tmp_path, UP_DOWN, save_every_steps=1, save_total_limit=None)
    assert (best.step, best.value, steps) == (2, 4.0, 6)
    ended = (run.paths.adapter / WEIGHTS).read_bytes()
    assert ended == (run.paths.checkpoint(2) / WEIGHTS).read_bytes()
    assert ended != (run.paths.checkpoint(6) / WEIGHTS).read_bytes()
    assert saved_steps(run) == [1, 2, 3, 4, 5, 6]


def test_the_last_weights_are_saved_by_default(plan: Plan, held_out: Store, tmp_path: Path) -> None:
    changes = {"load_best_model_at_end": False, "save_every_steps": 2}
    run, best, _, _ = train_scripted(plan, held_out, tmp_path, UP_DOWN, **changes)
    assert best.step == 2
    assert (run.paths.adapter / WEIGHTS).read_bytes() == (run.paths.checkpoint(6) / WEIGHTS).read_bytes()


def test_a_new_best_is_saved_even_if_no_checkpoint_is_due(plan: Plan, held_out: Store, tmp_path: Path) -> None:
    run, best, _, _ = train_scripted(plan, held_out, tmp_path, UP_DOWN, save_total_limit=1)
    assert best.step == 2
    assert saved_steps(run) == [2]
    assert (run.paths.adapter / WEIGHTS).read_bytes() == (run.paths.checkpoint(2) / WEIGHTS).read_bytes()


@pytest.mark.parametrize(("limit", "kept"), [(1, [2, 6]), (2, [2, 6]), (3, [2, 5, 6]), (None, [1, 2, 3, 4, 5, 6])])
def test_a_limit_keeps_the_best_and_the_last(
    plan: Plan, held_out: Store, tmp_path: Path, limit: int | None, kept: list[int]
) -> None:
    run, _, _, _ = train_scripted(plan, held_out, tmp_path, UP_DOWN, save_every_steps=1, save_total_limit=limit)
    assert saved_steps(run) == kept
    assert not list(run.paths.checkpoints.glob(".*")), "nothing half-made is left"


@pytest.mark.parametrize(
    ("values", "patience", "threshold", "stopped"),
    [
        (UP_DOWN, None, 0.0, 6),
        (UP_DOWN, 1, 0.0, 3),
        (UP_DOWN, 2, 0.0, 4),
        (UP_DOWN, 3, 0.0, 5),
        ({1: 5.0, 2: 5.0, 3: 5.0, 4: 5.0, 5: 5.0, 6: 5.0}, 2, 0.0, 3),  # the same is not better
        ({1: 5.0, 2: 4.9, 3: 4.8, 4: 4.7, 5: 4.6, 6: 4.5}, 2, 0.2, 3),  # better, but not by enough
        ({1: 5.0, 2: 4.7, 3: 4.6, 4: 4.3, 5: 4.2, 6: 4.1}, 2, 0.2, 6),  # enough now and then
        ({1: float("nan"), 2: 4.0, 3: 3.9, 4: 3.8, 5: 3.7, 6: 3.6}, 2, 0.0, 6),  # the first value is NaN
    ],
)
def test_early_stopping(
    plan: Plan,
    held_out: Store,
    tmp_path: Path,
    values: dict[int, float],
    patience: int | None,
    threshold: float,
    stopped: int,
) -> None:
    changes = {"early_stopping_patience": patience, "early_stopping_threshold": threshold}
    _, _, recorder, steps = train_scripted(plan, held_out, tmp_path, values, **changes)
    assert steps == stopped
    assert [step.step for step in recorder.steps] == list(range(1, stopped + 1)), (
        "every step was reported, the last too"
    )


RATES = {1: 0.5, 2: 0.8, 3: 0.8, 4: 0.7, 5: 0.8, 6: 0.6}
LOSSES = {1: 1.0, 2: 3.0, 3: 2.0, 4: 0.5, 5: 2.0, 6: 0.1}


def make_best(patience: int | None = None, threshold: float = 0.0) -> BestCheckpoint:
    changes: dict[str, Any] = {
        "metric_for_best_model": "eval/equal",
        "early_stopping_patience": patience,
        "early_stopping_threshold": threshold,
        "load_best_model_at_end": True,
    }
    return BestCheckpoint(SchedulePlan.model_construct(**changes))


def observe(best: BestCheckpoint, steps: Sequence[int]) -> list[int]:
    """Return the steps at which a checkpoint is requested, up to an early stop."""
    requested = []
    for step in steps:
        if best.should_stop():
            break
        values = {"eval/loss": LOSSES[step], "eval/equal": RATES[step]} if step else {"eval/equal": 1.0}
        if best.on_evaluation(None, StepMetrics(step=step, epoch=0.0, values=values)):  # type: ignore[arg-type]
            requested.append(step)
    return requested


def test_the_highest_rate_is_best_and_the_loss_decides_between_equal_rates() -> None:
    best = make_best()
    assert observe(best, range(7)) == [1, 2, 3]  # step 0 is the base; 5 has the rate and the loss of 3
    assert (best.step, best.value) == (3, 0.8)


@pytest.mark.parametrize(("patience", "threshold", "last"), [(1, 0.0, 3), (2, 0.0, 4), (3, 0.2, 5), (4, 0.0, 6)])
def test_early_stopping_by_a_rate(patience: int, threshold: float, last: int) -> None:
    best = make_best(patience, threshold)
    observe(best, range(last + 1))
    assert best.should_stop()
    assert "no improvement of eval/equal on step 3" in best.stop_reason
    assert not (observe(earlier := make_best(patience, threshold), range(last)) and earlier.should_stop())


@pytest.mark.parametrize("cut", range(7))
def test_the_best_rate_is_the_same_after_a_resume(cut: int) -> None:
    whole, first, resumed = make_best(3), make_best(3), make_best(3)
    observe(whole, range(7))
    observe(first, range(cut))
    resumed.restore(BestState.model_validate_json(first.state.model_dump_json()))
    observe(resumed, range(cut, 7))
    assert resumed.state == whole.state


def test_the_best_of_another_metric_is_not_restored() -> None:
    best = make_best()
    best.restore(BestState(step=4, value=2.5, worse_in_a_row=1))
    assert best.state == make_best().state


class Interrupted:
    """Task evaluations by script; a signal interrupts that of one step."""

    def __init__(self, step: int | None) -> None:
        self._step, self.must_repeat, self.evaluated = step, False, list[int]()

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        return step > 0 and not is_last

    def evaluate(self, step: int) -> dict[str, float]:
        self.must_repeat = step == self._step
        if self.must_repeat:
            return {}
        self.evaluated.append(step)
        return {"eval/equal": RATES[step]}


@pytest.mark.parametrize("at", [2, 4, 6])
def test_an_interrupted_evaluation_is_repeated_after_a_resume(
    plan: Plan, held_out: Store, tmp_path: Path, at: int
) -> None:
    schedule = {"max_steps": 6, "evaluate_every_steps": 2, "metric_for_best_model": "eval/equal"}
    varied = vary(plan, {f"schedule.{key}": value for key, value in schedule.items()})

    def go(root: Path, tasks: Interrupted) -> tuple[TrainingRun, BestCheckpoint, TrainProgress]:
        run = build(varied, held_out, root)
        best, resume_point = BestCheckpoint(run.plan.schedule), resume_run(run, ResumeOptions())
        if resume_point.best is not None:
            best.restore(resume_point.best)
        observers = Observers([best, checkpointer := Checkpointer(best)])
        train(run, observers, resume_point.progress, tasks=tasks)  # type: ignore[arg-type]
        checkpointer.close()
        return run, best, resume_point.progress

    whole, whole_best, _ = go(tmp_path / "whole", Interrupted(None))
    _, _, progress = go(tmp_path / "cut", Interrupted(at))
    assert (progress.step, progress.owes_evaluation) == (at, True)
    resumed, best, progress = go(tmp_path / "cut", repeated := Interrupted(None))
    assert repeated.evaluated == list(range(at, 7, 2))
    assert (progress.step, progress.owes_evaluation) == (6, False)
    assert best.state == whole_best.state
    assert (resumed.paths.adapter / WEIGHTS).read_bytes() == (whole.paths.adapter / WEIGHTS).read_bytes()


def test_the_best_of_real_evaluations(plan: Plan, held_out: Store, tmp_path: Path) -> None:
    schedule = {"max_steps": 6, "evaluate_every_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    varied = vary(plan, {"optimizer.learning_rate": 0.05, **{f"schedule.{k}": v for k, v in schedule.items()}})
    run = build(varied, held_out, tmp_path)
    best, recorder = BestCheckpoint(run.plan.schedule), Recorder()
    train(run, Observers([recorder, best, Checkpointer(best)]))
    losses = [evaluation.values[metrics.EVAL_LOSS] for evaluation in recorder.evaluations]
    assert best.value == min(losses)
    assert best.step == losses.index(min(losses)) + 1 < 6


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_saved_weights_equal_trained_weights(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    run = build(vary(plan, {**adapt(kind), "schedule.max_steps": 2}), store, tmp_path)
    train(run, Observers([Checkpointer(BestCheckpoint(run.plan.schedule))]))
    saved = load_file(run.paths.adapter / (WEIGHTS if kind == "lora" else "model.safetensors"))
    live = {
        name.removeprefix("model.").replace(".default", "") if kind == "lora" else name.removeprefix("model."): weight
        for name, weight in trained_weights(run).items()
    }
    assert saved.keys() == live.keys()
    assert all(torch.equal(saved[name], live[name]) for name in saved)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_saved_files_follow_the_umask(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    run = build(vary(plan, adapt(kind)), store, tmp_path)
    before = os.umask(0o022)
    try:
        save_weights(run, run.paths.adapter)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in run.paths.adapter.iterdir()} == {0o644}


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_the_adapter_config_is_deterministic(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    """PEFT keeps names in sets, whose order differs between processes."""
    run = build(vary(plan, adapt(kind)), store, tmp_path)
    save_weights(run, run.paths.adapter)
    config = json.loads((run.paths.adapter / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert len(config["target_modules"]) == 5


def test_config_json_names_the_saved_dtype(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Trained in FP32 and saved in BF16: loaders use config.json, and would take twice the memory."""
    run = build(vary(plan, adapt("full")), store, tmp_path)
    rounded = replace(run, plan=vary(run.plan, {"precision.compute_dtype": "bf16"}))
    save_weights(rounded, run.paths.adapter)
    weights = load_file(run.paths.adapter / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((run.paths.adapter / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(run.paths.adapter).dtype == torch.bfloat16


def test_a_full_disk_is_reported_and_leaves_no_partial_files(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_arguments: Any, **_more: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    run = build(plan, store, tmp_path)
    monkeypatch.setattr(run.engine.module.model, "save_pretrained", fill)
    with pytest.raises(RunFailedError, match=r"step-000002 cannot be written: .*No space left") as failed:
        save_weights(run, run.paths.checkpoint(2))
    assert "disk is full" in failed.value.hint
    assert list(run.paths.checkpoints.iterdir()) == []


def fail_checkpoints(monkeypatch: pytest.MonkeyPatch, steps: set[int], error: Exception) -> None:
    real = write_exact_weights

    def fail(run: TrainingRun, folder: Path, weights: Any) -> None:
        if int(folder.name.split("-")[1].split(".")[0]) in steps:
            raise error
        real(run, folder, weights)

    monkeypatch.setattr(snapshot, "write_exact_weights", fail)


@pytest.mark.parametrize(
    ("failing", "every", "error"),
    [
        ({4}, 4, OSError(28, "No space left on device")),
        ({3}, 1, OSError(28, "No space left on device")),  # noticed when the last step is saved
        ({4}, 1, MemoryError()),
    ],
)
def test_a_failed_last_checkpoint_does_not_lose_the_weights(
    plan: Plan,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: set[int],
    every: int,
    error: Exception,
) -> None:
    varied = vary(plan, {"schedule.max_steps": 4, "schedule.save_every_steps": every})
    whole = build(varied, store, tmp_path / "whole")
    train(whole, Observers([Checkpointer(BestCheckpoint(varied.schedule))]))
    fail_checkpoints(monkeypatch, failing, error)
    run = build(varied, store, tmp_path / "run")
    with pytest.raises((RunFailedError, MemoryError)):
        train(run, Observers([Checkpointer(BestCheckpoint(varied.schedule))]))
    assert (run.paths.adapter / WEIGHTS).read_bytes() == (whole.paths.adapter / WEIGHTS).read_bytes()
    assert (run.paths.adapter / "adapter_config.json").is_file()


def test_an_early_stop_after_a_failed_checkpoint_saves_the_weights(
    plan: Plan, held_out: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_checkpoints(monkeypatch, {3}, OSError(28, "No space left on device"))
    with pytest.raises(RunFailedError, match="step-000003 cannot be written"):
        train_scripted(
            *(plan, held_out, tmp_path, UP_DOWN),
            save_every_steps=1,
            early_stopping_patience=2,
            load_best_model_at_end=False,
        )
    assert (tmp_path / "adapter" / WEIGHTS).is_file()


def test_a_failed_checkpoint_in_the_middle_ends_the_run(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_checkpoints(monkeypatch, {2}, OSError(28, "No space left on device"))
    run = build(vary(plan, {"schedule.max_steps": 4, "schedule.save_every_steps": 1}), store, tmp_path)
    with pytest.raises(RunFailedError, match="step-000002 cannot be written"):
        train(run, Observers([Checkpointer(BestCheckpoint(run.plan.schedule))]))
    assert not run.paths.adapter.exists()


@pytest.mark.parametrize("what", ["metrics", "snapshot", "evaluation"])
def test_a_failure_after_the_last_step_does_not_take_the_trained_weights(
    plan: Plan, held_out: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    schedule = {"max_steps": 2, "evaluate_every_steps": 1, "save_every_steps": 1, "load_best_model_at_end": False}
    run = build(vary(plan, {f"schedule.{key}": value for key, value in schedule.items()}), held_out, tmp_path)
    module, name = {
        "metrics": (metrics_writer, "append_metrics"),
        "snapshot": (checkpointer, "take_snapshot"),
        "evaluation": (Evaluator, "evaluate"),
    }[what]
    real = getattr(module, name)

    def fail(*given: Any) -> Any:
        step = given[1] if what == "evaluation" else given[1].step
        if step < run.num_steps:
            return real(*given)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, name, fail)
    best = BestCheckpoint(run.plan.schedule)
    with pytest.raises((RunFailedError, OSError), match="No space left on device"):
        train(run, Observers([MetricsWriter(), best, Checkpointer(best)]))
    saved, trained = load_file(run.paths.adapter / WEIGHTS), trained_weights(run)
    assert sorted(map(tensor_sum, saved.values())) == sorted(map(tensor_sum, trained.values()))


def tensor_sum(weight: torch.Tensor) -> float:
    return float(weight.double().sum())
