"""Out of memory: the run retries with a fallback, the same global batch and the same samples; nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launcher.core import metrics
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.model import OomFallback, Plan, load_plan
from launcher.plan.oom_fallbacks import apply_next_fallback
from launcher.request.request import Request, plan_request
from launcher.runs.oom_history import Failure, find_failure, load_history, remember_failure
from launcher.runs.record import load_outcome
from launcher.train import main as train_main
from launcher.training.checkpoint.resume import ResumeOptions
from launcher.training.data.collate import PackedBatch
from launcher.training.engine.engine import Engine, HalfUpdatedError
from launcher.training.evaluation.heldout_loss import Evaluator
from launcher.training.observers.memory_pressure import MemoryPressure
from launcher.training.oom import format_oom_error
from launcher.training.runtime.run_record import RunRecorder
from launcher.training.trainer import TrainerInputs, run_training
from tests.training.builders import VOCABULARY, build, make_uneven_packs, reset_accelerate, split, vary, write_store

Fails = Callable[[PackedBatch, int], bool]


def fallback(micro_batch_size: int, accumulation: int, checkpointing: str = "none") -> OomFallback:
    return OomFallback(
        action=f"micro-batch {micro_batch_size}, {checkpointing}",
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        checkpointing=checkpointing,
        strategy="single",
        offload="none",
        predicted_bytes=1000 * micro_batch_size,
    )


@pytest.fixture(scope="module")
def plan_with_fallbacks(plan: Plan) -> Plan:
    varied = vary(plan, {**split(4, 1), "schedule.max_steps": 6, "schedule.save_every_steps": 4})
    return varied.model_copy(update={"oom_fallbacks": (fallback(2, 2), fallback(1, 4), fallback(1, 4, "full"))})


def run_whole(plan: Plan, store: Store, root: Path) -> RunPaths:
    root.mkdir(parents=True, exist_ok=True)
    paths = RunPaths(root)
    paths.plan.write_text(plan.model_dump_json())
    reset_accelerate()
    task = TrainerInputs(
        plan=plan, paths=paths, store=store, folders=(), vocab_size=VOCABULARY, options=ResumeOptions()
    )
    recorder = RunRecorder(paths, is_main=True)
    run_training(task, recorder)
    recorder.finish(status="done", exit_code=0)
    return paths


def fail_where(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    """Raises in the middle of a step, with gradients of earlier micro-batches, as CUDA's allocator does."""
    real, count = Engine.micro_step, [0]

    def micro_step(self: Engine, batch: PackedBatch, num_trained: int, *, is_last: bool) -> Tensor:
        count[0] += 1
        loss = real(self, batch, num_trained, is_last=is_last)
        if fails(batch, count[0]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return loss

    monkeypatch.setattr(Engine, "micro_step", micro_step)


def load_steps(paths: RunPaths) -> list[StepMetrics]:
    return [row for row in load_metrics(paths.metrics) if metrics.TRAIN_LOSS in row.values]


def losses(paths: RunPaths) -> list[float]:
    return [row.values[metrics.TRAIN_LOSS] for row in load_steps(paths)]


@pytest.fixture(scope="module")
def whole(plan_with_fallbacks: Plan, store: Store, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run with enough memory."""
    return run_whole(plan_with_fallbacks, store, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("first", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 6])
def test_out_of_memory_retries_with_a_fallback(
    plan_with_fallbacks: Plan,
    store: Store,
    whole: RunPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    first: int,
) -> None:
    """Large micro-batches fail from micro-step `first`."""
    limit = plan_with_fallbacks.batch.sequence_length * 2
    fail_where(monkeypatch, lambda batch, count: count >= first and batch.input_ids.numel() > limit)
    lower = run_whole(plan_with_fallbacks, store, tmp_path / "lower")
    assert [row.step for row in load_steps(lower)] == [1, 2, 3, 4, 5, 6], "each step once"
    assert [row.packs for row in load_steps(lower)] == [row.packs for row in load_steps(whole)], "the same samples"
    assert losses(lower) == pytest.approx(losses(whole), rel=1e-6)
    outcome = load_outcome(lower.outcome)
    assert outcome is not None
    assert outcome.oom_fallbacks == ("micro-batch 2, none",)
    assert outcome.steps_done == 6
    changed = load_plan(lower.plan)
    assert (changed.batch.micro_batch_size, changed.batch.gradient_accumulation_steps) == (2, 2)
    assert changed.batch.global_batch_size == plan_with_fallbacks.batch.global_batch_size
    console = capsys.readouterr().err
    assert "out of memory (CUDA out of memory. Tried to allocate 20.00 GiB); retrying with" in console
    if first > 1:
        assert f"resuming after step {first - 1}" in console, "what was trained was not trained again"


@pytest.mark.slow
def test_the_final_error_is_about_the_last_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = plan_request(Request(expert="neo4j", profile="smoke", max_steps=2)).plan
    fallbacks = (fallback(2, planned.batch.global_batch_size // 2), fallback(1, planned.batch.global_batch_size))
    paths = RunPaths(tmp_path / "run")
    paths.logs.mkdir(parents=True)
    paths.plan.write_text(planned.model_copy(update={"oom_fallbacks": fallbacks, "task_eval": None}).model_dump_json())
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    fail_where(monkeypatch, lambda _batch, _count: True)
    reset_accelerate()
    assert train_main(["--plan", str(paths.plan)]) == 3
    console = capsys.readouterr().err
    assert "retrying with micro-batch 1, none" in console
    assert "no fallback is left" in console
    assert "OOM fallbacks, in order" not in console


def test_all_fallbacks_are_tried(
    plan_with_fallbacks: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_where(monkeypatch, lambda _batch, count: count >= 3)
    with pytest.raises(torch.OutOfMemoryError):
        run_whole(plan_with_fallbacks, store, tmp_path)
    outcome = load_outcome(RunPaths(tmp_path).outcome)
    assert outcome is not None
    assert outcome.oom_fallbacks == ("micro-batch 2, none", "micro-batch 1, none", "micro-batch 1, full")
    lowest = load_plan(RunPaths(tmp_path).plan)
    assert lowest.oom_fallbacks == ()
    text = format_oom_error(torch.OutOfMemoryError("CUDA out of memory.\nmore"), lowest)
    assert text.startswith("out of memory: CUDA out of memory.\n")
    assert "predicted" in text
    assert "no fallback is left" in text


def test_a_half_done_update_is_not_retried(
    plan_with_fallbacks: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights may be updated: the run must resume from its last checkpoint."""

    def fail(_self: Engine, _loss: Tensor, _is_nonfinite: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Engine, "_step", fail)
    with pytest.raises(HalfUpdatedError):
        run_whole(plan_with_fallbacks, store, tmp_path)
    assert not list(RunPaths(tmp_path).checkpoints.glob("*"))


def test_repeated_allocator_retries_count_as_out_of_memory(
    plan_with_fallbacks: Plan, store: Store, tmp_path: Path
) -> None:
    run = build(plan_with_fallbacks, store, tmp_path)

    def tell(counts: list[float]) -> None:
        observer = MemoryPressure()
        for step, count in enumerate(counts, 1):
            observer.on_step(run, StepMetrics(step=step, epoch=0.0, values={metrics.ALLOC_RETRIES: count}))

    tell([0] * 20)
    tell([5, 5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 8])  # now and then
    with pytest.raises(torch.OutOfMemoryError, match="4 of the last 5 steps"):
        tell([0, 1, 2, 3, 4])


def evaluate(evaluator: Evaluator) -> float:
    values = evaluator.evaluate(1)
    assert values is not None
    return values[metrics.EVAL_LOSS]


def test_evaluation_retries_with_a_smaller_batch(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_store(tmp_path / "store", make_uneven_packs(), make_uneven_packs())
    run = build(vary(plan, {"batch.eval_batch_size": 4}), store, tmp_path / "run")
    whole = evaluate(Evaluator(run))
    seen: list[int] = []

    def fail(_module: torch.nn.Module, inputs: tuple[PackedBatch, ...]) -> None:
        seen.append(inputs[0].input_ids.numel() // plan.batch.sequence_length)
        if seen[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = run.engine.model.register_forward_pre_hook(fail)
    evaluator = Evaluator(run)
    assert evaluate(evaluator) == pytest.approx(whole, rel=1e-6)
    assert seen[:3] == [4, 2, 1]
    seen.clear()
    evaluator.evaluate(1)
    assert set(seen) == {1}, "it is remembered"
    handle.remove()
    assert "CUDA out of memory during evaluation; retrying with batch size 1" in capsys.readouterr().err


def test_fallbacks_keep_the_global_batch() -> None:
    plan = plan_request(Request(expert="neo4j", gpu="rtx4090", gpus_per_node=4)).plan
    seen = []
    lower: Plan | None = plan
    while lower is not None:
        batch = lower.batch
        assert batch.global_batch_size == plan.batch.global_batch_size
        assert batch.num_slots - batch.empty_slots == batch.global_batch_size
        seen.append(lower.memory.total_bytes)
        assert Plan.model_validate_json(lower.model_dump_json()) == lower
        lower = apply_next_fallback(lower)
    assert len(seen) == len(plan.oom_fallbacks) + 1
    assert seen[1:] == sorted(seen[1:], reverse=True)


def test_a_failure_is_remembered_for_the_next_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_CACHE_DIR", str(tmp_path / "cache"))
    request = Request(expert="neo4j", gpu="rtx4090")
    plan = plan_request(request).plan
    assert find_failure(plan) is None
    remember_failure(plan)
    failure = find_failure(plan)
    assert failure is not None
    assert failure.predicted_bytes == plan.memory.total_bytes
    later = plan_request(request).plan
    assert later.memory.total_bytes < plan.memory.total_bytes
    assert any("ran out of memory here" in note for note in later.notes)
    remember_failure(plan)
    assert find_failure(later) == failure, "a larger one teaches nothing new"
    remember_failure(later)
    third = plan_request(request).plan
    assert third.memory.total_bytes < later.memory.total_bytes
    other = plan_request(Request(expert="neo4j", gpu="h100")).plan
    assert not any("ran out of memory" in note for note in other.notes)


@pytest.mark.parametrize("content", ["", "{", '{"schema_version": 9}', "[]"])
def test_an_unreadable_history_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setenv("LAUNCHER_CACHE_DIR", str(tmp_path))
    (tmp_path / "experience.json").write_text(content)
    assert load_history().failures == {}
    plan = plan_request(Request(expert="neo4j", gpu="rtx4090")).plan
    remember_failure(plan)
    assert len(json.loads((tmp_path / "experience.json").read_text())["failures"]) == 1
    assert isinstance(find_failure(plan), Failure)


def test_out_of_memory_after_the_optimizer_step_is_a_half_update_too(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    """The weights are updated: saved as the step before, that step would be trained twice."""
    run = build(plan, store, tmp_path)
    run.engine.micro_step(run.batches()[0], 10, is_last=True)

    def run_out(**_more: object) -> None:
        raise torch.OutOfMemoryError("no room for a copy of what was trained")

    monkeypatch.setattr(run.engine.module.fused_lora, "refresh", run_out)
    with pytest.raises(HalfUpdatedError):
        run.engine.update(torch.tensor(1.0))
