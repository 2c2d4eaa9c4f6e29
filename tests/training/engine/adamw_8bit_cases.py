"""AdamW with 8-bit state is bit-identical to bitsandbytes' own. Run by test_nf4.py."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine import adamw_8bit
from launcher.training.engine.optimizer import list_embeddings, unwrap_optimizer
from tests.training.builders import adapt, build, train_recorded, trained_weights, vary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Quantized: eleven that are batched, one whose size is no multiple of a block. Four are too small to be quantized.
UPDATED = [(16, 256)] * 4 + [(512, 16)] * 4 + [(1024, 4)] * 3 + [(67, 67)] + [(256,), (100,), (64,), (7, 3)]


@pytest.mark.parametrize("reloads", [False, True])
def test_updates_are_bit_identical_to_bitsandbytes_in_few_launches(
    monkeypatch: pytest.MonkeyPatch, reloads: bool
) -> None:
    """bitsandbytes launches one update per tensor and synchronizes after each."""
    waits: list[Tensor] = []
    monkeypatch.setattr(adamw_8bit.bnb_optimizer, "sync_gpu", waits.append)
    launches = count_launches(monkeypatch)
    expected = run_steps(bnb.optim.AdamW8bit, reloads=reloads)
    assert len(waits) == sum(launches) == 5 * len(UPDATED) - 1
    waits.clear()
    launches.clear()
    ours = run_steps(adamw_8bit.AdamW8bit, reloads=reloads)
    assert not waits
    # Two parameter groups, each with a quantized and an unquantized batch, and one tensor alone. In step 3 a weight has
    # no gradient; from then on it is updated alone, because its step count is lower.
    assert sum(launches) == 5 * 5 + 2
    assert len(ours) == len(expected) > 3 * len(UPDATED)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    launches: list[int] = []
    for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        own = getattr(adamw_8bit.bnb_optimizer.F, name)

        def counted(*arguments: Any, own: Any = own, **more: Any) -> None:
            launches.append(1)
            own(*arguments, **more)

        monkeypatch.setattr(adamw_8bit.bnb_optimizer.F, name, counted)
    return launches


def run_steps(kind: Callable[..., Optimizer], *, reloads: bool) -> list[Tensor]:
    """Run five steps with changing learning rate, a missing gradient and a reload; return weights and states."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=generator).to(DEVICE)) for size in UPDATED]
    groups = [{"params": weights[::2], "weight_decay": 0.1}, {"params": weights[1::2], "weight_decay": 0.0}]
    optimizer = kind(groups, lr=1e-2)
    for step in range(5):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(DEVICE)
        if step == 2:
            weights[1].grad = None
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        if reloads and step == 3:
            kept = deepcopy(optimizer.state_dict())
            optimizer = kind(groups, lr=1e-2)
            optimizer.load_state_dict(kept)
    states = [optimizer.state[weight] for weight in weights]
    assert [state["state1"].dtype for state in states] == [torch.uint8] * 12 + [torch.float32] * 4
    names = ("state1", "state2", "absmax1", "absmax2")
    kept_states = [state[name] for state in states for name in names if name in state]
    return [*weights, *kept_states, *(torch.tensor(state["step"]) for state in states)]


def test_training_equals_training_with_bitsandbytes(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = {"optimizer.name": "adamw_bnb_8bit", "schedule.max_steps": 4}
    eight = vary(plan, {**fixed, **adapt("lora", rank=128)})  # most tensors are large enough to be quantized
    run = build(eight, store, tmp_path / "ours")
    assert isinstance(unwrap_optimizer(run.engine.optimizer), adamw_8bit.AdamW8bit)
    ours = train_recorded(run)
    states = unwrap_optimizer(run.engine.optimizer).state.values()
    assert {state["state1"].dtype for state in states} == {torch.uint8, torch.float32}
    monkeypatch.setattr(adamw_8bit, "AdamW8bit", bnb.optim.AdamW8bit)
    other = build(eight, store, tmp_path / "expected")
    assert type(unwrap_optimizer(other.engine.optimizer)) is bnb.optim.AdamW8bit
    assert train_recorded(other).losses == ours.losses
    for name, weight in trained_weights(other).items():
        assert torch.equal(trained_weights(run)[name], weight), name


def test_states_of_embeddings_are_not_quantized(plan: Plan, store: Store, tmp_path: Path) -> None:
    eight = {"optimizer.name": "adamw_bnb_8bit", "schedule.max_steps": 1, "precision.base_dtype": "fp32"}
    run = build(vary(plan, {**eight, **adapt("full")}), store, tmp_path)
    train_recorded(run)
    (embedding,) = list_embeddings(run.engine.module)
    assert embedding.numel() >= 4096, "large enough to be quantized"
    assert unwrap_optimizer(run.engine.optimizer).state[embedding]["state1"].dtype == torch.float32
