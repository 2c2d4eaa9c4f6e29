"""Generation with the model being trained: its state is restored, and failures do not stop the training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from launcher.corpus.store import Store
from launcher.manifest.model import Decoding
from launcher.plan.model import Plan
from launcher.training.evaluation.eval_budget import TaskSlice
from launcher.training.evaluation.live_generation import (
    AttentionNotRestoredError,
    LiveGenerator,
    TaskEvalError,
    collect_attention_configs,
    generation_mode,
)
from launcher.training.evaluation.task_metrics import TaskEvaluator
from launcher.training.runtime.watchdog import Heartbeat
from tests.training.builders import build, vary


def make_generator(is_stopping: bool = False) -> LiveGenerator:
    run: Any = SimpleNamespace(heartbeat=Heartbeat())
    spec: Any = SimpleNamespace(tokenizer=None, template=SimpleNamespace(end_token=""))
    return LiveGenerator(run, spec, Decoding(), lambda: is_stopping)


def test_batch_size_is_halved_after_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def generate(self: LiveGenerator, *_: object) -> list[object]:
        tried.append(self.batch_size)
        if self.batch_size > 8:
            raise torch.OutOfMemoryError
        return []

    monkeypatch.setattr(LiveGenerator, "_generate", generate)
    generator = make_generator()
    assert generator.generate(["a"], 5) == []
    assert generator.generate(["a"], 5) == []
    assert tried == [64, 32, 16, 8, 8]


def test_failures_become_task_eval_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait for this one."""
    generator = make_generator()
    for error, words in (
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED\nand more"), "CUBLAS_STATUS_ALLOC_FAILED"),
        (TaskEvalError("the run is stopping"), "the run is stopping"),
        (torch.OutOfMemoryError(), "CUDA out of memory"),
    ):
        monkeypatch.setattr(LiveGenerator, "_generate", _raising(error))
        with pytest.raises(TaskEvalError, match=f"^{words}$"):
            generator.generate(["a"], 5)
    monkeypatch.setattr(LiveGenerator, "_generate", _raising(AttentionNotRestoredError("lost")))
    with pytest.raises(AttentionNotRestoredError):  # continuing would train something else
        generator.generate(["a"], 5)


def _raising(error: Exception) -> Any:
    def generate(*_: object) -> None:
        raise error

    return generate


def test_stop_request_ends_generation_at_the_next_token() -> None:
    make_generator()._on_token()
    with pytest.raises(TaskEvalError, match="the run is stopping"):
        make_generator(is_stopping=True)._on_token()


def test_model_state_is_restored(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, {"schedule.max_steps": 1}), store, tmp_path)
    base: Any = run.engine.module.base
    before, state = collect_attention_configs(base), torch.get_rng_state()
    with generation_mode(run):
        assert {name for _, name in collect_attention_configs(base)} == {"sdpa"}
        assert not run.engine.model.training
        assert not torch.is_grad_enabled()
        torch.rand(5)
    assert collect_attention_configs(base) == before
    assert all("launcher_" in name for _, name in before)
    assert torch.equal(torch.get_rng_state(), state)
    assert run.engine.model.training


def test_attention_is_restored_if_the_switch_fails(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes one part of the model and rejects the next."""
    run = build(vary(plan, {"schedule.max_steps": 1}), store, tmp_path)
    base: Any = run.engine.module.base
    before = collect_attention_configs(base)

    def refuse(name: str) -> None:
        base.config._attn_implementation = name
        raise ValueError("this part cannot")

    monkeypatch.setattr(base, "set_attn_implementation", refuse)
    with pytest.raises(ValueError, match="cannot"), generation_mode(run):
        pass
    assert collect_attention_configs(base) == before


def test_only_ends_evaluates_first_and_last_step() -> None:
    """The last step may come early; a step is evaluated only once."""
    tasks = TaskEvaluator.__new__(TaskEvaluator)
    tasks._run, tasks._last_step, tasks._min_rows = cast(Any, SimpleNamespace(num_steps=100)), None, 0
    tasks._slice = TaskSlice(num_rows=8, max_new_tokens=9, only_ends=True, why="")
    assert [step for step in (0, 20, 40, 100) if tasks.is_due(step)] == [0, 100]
    assert tasks.is_due(40, is_last=True)
    tasks._last_step = 40
    assert not tasks.is_due(40, is_last=True)
