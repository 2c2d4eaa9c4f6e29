"""An adapter trains its own weights and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine.run import TrainingRun
from tests.training.builders import adapt, build, train_recorded, vary

ADAPTERS = ("lora", "dora", "ia3")
MARKS = {"lora": ("lora_A", "lora_B"), "dora": ("lora_A", "lora_B", "lora_magnitude_vector"), "ia3": ("ia3_l",)}


def frozen_bytes(run: TrainingRun) -> dict[str, bytes]:
    state = run.engine.module.state_dict()
    trained = {name for name, parameter in run.engine.module.named_parameters() if parameter.requires_grad}
    return {name: tensor.numpy().tobytes() for name, tensor in state.items() if name not in trained}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_frozen_weights_are_bit_identical_after_training(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    run = build(vary(plan, {**adapt(kind), "optimizer.weight_decay": 0.5}), store, tmp_path)
    before = frozen_bytes(run)
    assert sum(map(len, before.values())) > 4 * 10_000
    recorder = train_recorded(run)
    assert recorder.losses[-1] != recorder.losses[0]
    assert frozen_bytes(run) == before


@pytest.mark.parametrize("kind", ADAPTERS)
def test_frozen_weights_have_no_gradient_and_no_optimizer_state(
    plan: Plan, store: Store, tmp_path: Path, kind: str
) -> None:
    run = build(vary(plan, adapt(kind)), store, tmp_path)
    engine = run.engine
    loss = engine.micro_step(run.batches()[0], 1, is_last=True)
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in engine.module.named_parameters() if any(m in name for m in MARKS[kind])}
    engine.update(loss)
    expected = {id(parameter) for name, parameter in engine.module.named_parameters() if name in trained}
    assert {id(p) for group in engine.optimizer.param_groups for p in group["params"]} == expected
    assert {id(parameter) for parameter in engine.optimizer.state} == expected


def test_gradients_are_cleared_after_an_update(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Otherwise the next step would accumulate into them."""
    run = build(plan, store, tmp_path)
    loss = run.engine.micro_step(run.batches()[0], 1, is_last=True)
    run.engine.update(loss)
    assert all(parameter.grad is None for parameter in run.engine.trained_parameters())


def test_full_fine_tuning_trains_all_weights(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, adapt("full")), store, tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in run.engine.module.named_parameters()}
    train_recorded(run)
    unmoved = [name for name, p in run.engine.module.named_parameters() if torch.equal(p, before[name])]
    assert unmoved == []
