"""Asking a live model: what stays as it was, and what is done when something goes wrong."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from launcher.corpus.store import Store
from launcher.manifest.metadata import Decoding
from launcher.plan.model import Plan
from launcher.training import asking
from launcher.training.asking import Asker, AttentionLostError, StoppedError, answering, find_attentions, kept_alive
from launcher.training.slices import TaskSlice
from launcher.training.tasks import Tasks
from launcher.training.watchdog import Pulse
from tests.training.builders import build, vary


def make_asker(stops: bool = False) -> Asker:
    run: Any = SimpleNamespace(pulse=Pulse())
    wanted: Any = SimpleNamespace(tokenizer=None, template=SimpleNamespace(end_token=""))
    return Asker(run, wanted, Decoding(), lambda: stops)


def test_where_memory_runs_out_fewer_are_asked_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def answer(self: Asker, *_: object) -> list[object]:
        tried.append(self.at_once)
        if self.at_once > 8:
            raise torch.OutOfMemoryError
        return []

    monkeypatch.setattr(Asker, "_answer", answer)
    asker = make_asker()
    assert asker.answer(["a"], 5) == []
    assert asker.answer(["a"], 5) == []
    assert tried == [64, 32, 16, 8, 8]


def test_what_goes_wrong_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait for this one."""
    asker = make_asker()
    for error, words in (
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED\nand more"), "CUBLAS_STATUS_ALLOC_FAILED"),
        (StoppedError(), "the run was asked to stop"),
        (torch.OutOfMemoryError(), "memory ran out"),
    ):
        monkeypatch.setattr(Asker, "_answer", _raising(error))
        assert asker.answer(["a"], 5) == words
    monkeypatch.setattr(Asker, "_answer", _raising(AttentionLostError("lost")))
    with pytest.raises(AttentionLostError):  # to train on would be to train something else
        asker.answer(["a"], 5)


def _raising(error: Exception) -> Any:
    def answer(*_: object) -> None:
        raise error

    return answer


def test_a_run_that_is_asked_to_stop_stops_at_the_next_token() -> None:
    make_asker()._on_token()
    with pytest.raises(StoppedError):
        make_asker(stops=True)._on_token()


def test_a_judge_that_takes_its_time_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_BEAT_SECONDS", 0.02)
    run: Any = SimpleNamespace(pulse=Pulse())
    with kept_alive(run):
        time.sleep(0.3)
        assert run.pulse.seconds < 0.2
        assert run.pulse.doing == "evaluating"
    seconds = run.pulse.seconds
    time.sleep(0.1)
    assert run.pulse.seconds > seconds  # nobody beats any more


def test_the_model_is_as_it_was(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, {"schedule.max_steps": 1}), store, tmp_path)
    base: Any = run.engine.module.base
    before, state = find_attentions(base), torch.get_rng_state()
    with answering(run):
        assert {name for _, name in find_attentions(base)} == {"sdpa"}
        assert not run.engine.model.training
        assert not torch.is_grad_enabled()
        torch.rand(5)
    assert find_attentions(base) == before
    assert all("launcher_" in name for _, name in before)
    assert torch.equal(torch.get_rng_state(), state)
    assert run.engine.model.training


def test_a_model_that_takes_no_other_attention_keeps_its_own(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes one part, and refuses the next."""
    run = build(vary(plan, {"schedule.max_steps": 1}), store, tmp_path)
    base: Any = run.engine.module.base
    before = find_attentions(base)

    def refuse(name: str) -> None:
        base.config._attn_implementation = name
        raise ValueError("this part cannot")

    monkeypatch.setattr(base, "set_attn_implementation", refuse)
    with pytest.raises(ValueError, match="cannot"), answering(run):
        pass
    assert find_attentions(base) == before


def test_both_ends_are_the_first_step_and_wherever_it_ends() -> None:
    """Also where it stops early; and nobody is asked twice behind the same step."""
    tasks = Tasks.__new__(Tasks)
    tasks._run, tasks._asked_at = cast(Any, SimpleNamespace(num_steps=100)), None
    tasks._slice = TaskSlice(num_rows=8, max_new_tokens=9, only_ends=True, why="")
    assert [step for step in (0, 20, 40, 100) if tasks.is_due(step)] == [0, 100]
    assert tasks.is_due(40, is_last=True)
    tasks._asked_at = 40
    assert not tasks.is_due(40, is_last=True)
