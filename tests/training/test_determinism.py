"""Same seed, same training, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.core import metrics
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine.collectives import seed_rank
from launcher.training.loop import train
from launcher.training.observers.base import Observers
from launcher.training.observers.best_checkpoint import BestCheckpoint
from launcher.training.observers.checkpointer import Checkpointer
from tests.training.builders import Recorder, adapt, build, split, vary

Trace = tuple[list[str], list[str], list[tuple[int, ...]], dict[str, bytes]]


def trace(plan: Plan, store: Store, root: Path) -> Trace:
    """Losses and norms bit for bit, the packs, the files of the adapter."""
    run = build(plan, store, root, is_checked=True)
    recorder = Recorder()
    train(run, Observers([recorder, Checkpointer(BestCheckpoint(plan.schedule))]))
    files = {file.name: file.read_bytes() for file in run.paths.adapter.iterdir() if file.suffix != ".md"}
    norms = recorder.values(metrics.GRAD_NORM)
    packs = [step.packs for step in recorder.steps]
    return [loss.hex() for loss in recorder.losses], [norm.hex() for norm in norms], packs, files


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adapter.dropout": 0.2, **split(2, 2)},  # what training draws comes from the seed too
        {**adapt("full"), "checkpointing": "full", "batch.group_by_length": True},
    ],
    ids=["lora", "dropout", "full"],
)
def test_the_same_seed_trains_the_same(plan: Plan, store: Store, tmp_path: Path, changes: dict[str, Any]) -> None:
    varied = vary(plan, changes)
    first = trace(varied, store, tmp_path / "first")
    assert "adapter_model.safetensors" in first[3] or "model.safetensors" in first[3]
    assert trace(varied, store, tmp_path / "second") == first


def test_another_seed_trains_otherwise(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Another order of packs, other first weights of the adapter."""
    losses, _, packs, files = trace(plan, store, tmp_path / "first")
    other = trace(vary(plan, {"schedule.seed": 43}), store, tmp_path / "other")
    assert other[0] != losses
    assert other[2] != packs
    assert other[3]["adapter_model.safetensors"] != files["adapter_model.safetensors"]


@pytest.mark.parametrize("changes", [{}, adapt("full"), adapt("lora", rank=7)], ids=["lora", "full", "rank 7"])
def test_what_training_draws_does_not_depend_on_what_building_drew(
    plan: Plan, store: Store, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Dropout is the same whatever the adapter, the backend and the proof used up before."""
    build(vary(plan, changes), store, tmp_path, is_checked=True)
    begin = torch.get_rng_state()
    torch.manual_seed(plan.schedule.seed)
    assert torch.equal(begin, torch.get_rng_state())


def test_ranks_draw_different_random_numbers_by_the_seed_alone() -> None:
    """Rank 0 keeps the state of a single process; a rank that joins at a resume is seeded by that step."""

    def draw(seed: int, rank: int, step: int = 0) -> float:
        torch.manual_seed(seed)
        seed_rank(seed, rank, step)
        return float(torch.rand(()))

    torch.manual_seed(42)
    expected = float(torch.rand(()))
    assert draw(42, 0) == expected
    drawn = [draw(42, rank) for rank in range(4)]
    assert len(set(drawn)) == 4
    assert [draw(42, rank) for rank in range(4)] == drawn
    assert draw(43, 1) not in drawn
    assert draw(42, 1, step=3) not in drawn
