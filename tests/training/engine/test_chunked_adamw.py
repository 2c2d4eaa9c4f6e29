"""Full fine-tuning with BF16 weights: stochastic rounding, updates within the backward pass, moments in CPU memory."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Qwen3ForCausalLM

from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine import chunked_adamw
from launcher.training.engine.chunked_adamw import ChunkedAdamW, OptimizerInBackward
from launcher.training.engine.engine import HalfUpdatedError
from launcher.training.engine.optimizer import unwrap_optimizer
from tests.training.builders import (
    adapt,
    build,
    make_config,
    moved_difference,
    split,
    train_recorded,
    trained_weights,
    vary,
    write_base,
)
from tests.training.test_families import plan_family

pytestmark = pytest.mark.usefixtures("_without_mkldnn")

BF16 = {
    **adapt("full"),
    **dict.fromkeys((f"precision.{name}_dtype" for name in ("base", "trainable", "compute")), "bf16"),
    "batch.sequence_length": 16,
}
IN_BACKWARD = {"optimizer.in_backward": True, "optimizer.max_grad_norm": None, **split(4, 1)}
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


def make_weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((40, 30), (100,), (7, 3))]


def run_steps(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], num_steps: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def test_fp32_weights_are_updated_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_adamw, "UPDATE_CHUNK", 512)  # the first tensor has three chunks
    weights, expected = make_weights(), make_weights()
    groups: list[dict[str, Any]] = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:]}]
    ours = run_steps(ChunkedAdamW(groups, seed=0, **SETTINGS), weights)
    plain = [{"params": expected[:1], "weight_decay": 0.1}, {"params": expected[1:], "weight_decay": 0.0}]
    for mine, theirs in zip(ours, run_steps(torch.optim.AdamW(plain, **SETTINGS), expected), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_chunks_do_not_change_bf16_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_weights(torch.bfloat16)
    expected = run_steps(ChunkedAdamW([{"params": whole}], seed=3, **SETTINGS), whole)
    monkeypatch.setattr(chunked_adamw, "UPDATE_CHUNK", 512)
    chunked = make_weights(torch.bfloat16)
    for mine, other in zip(run_steps(ChunkedAdamW([{"params": chunked}], seed=3, **SETTINGS), chunked), expected,
                           strict=True):  # fmt: skip
        assert torch.equal(mine, other)


def test_a_skipped_step_changes_nothing() -> None:
    weights = make_weights(torch.bfloat16)
    optimizer = ChunkedAdamW([{"params": weights}], seed=3, **SETTINGS)
    run_steps(optimizer, weights, 2)
    before = [(weight.detach().clone(), optimizer.state[weight]["state1"].clone()) for weight in weights]
    for weight in weights:
        weight.grad = torch.full_like(weight, float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for weight, (kept, moment) in zip(weights, before, strict=True):
        assert torch.equal(weight, kept)
        assert torch.equal(optimizer.state[weight]["state1"], moment)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_gradients_freed_in_backward_give_the_same_weights(
    plan: Plan, short_store: Store, tmp_path: Path, checkpointing: str
) -> None:
    changes = {**BF16, **IN_BACKWARD, "checkpointing": checkpointing, "schedule.max_steps": 5}
    after = build(vary(plan, {**changes, "optimizer.in_backward": False}), short_store, tmp_path / "after")
    within = build(vary(plan, changes), short_store, tmp_path / "within")
    assert isinstance(unwrap_optimizer(within.engine.optimizer), ChunkedAdamW)
    expected, recorded = train_recorded(after), train_recorded(within)
    assert recorded.losses == expected.losses
    for norm, other in zip(recorded.values("train/grad_norm"), expected.values("train/grad_norm"), strict=True):
        assert norm == pytest.approx(other, rel=2e-2)  # torch's norm of BF16 gradients is rounded to BF16
    for name, weight in trained_weights(after).items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(trained_weights(within)[name], weight), name
    assert all(weight.grad is None for weight in within.engine.trained_parameters())


def test_a_nonfinite_loss_or_gradient_does_not_reach_the_weights() -> None:
    for poison in ("loss", "gradient"):
        weight, other = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))
        hooks = OptimizerInBackward(ChunkedAdamW([{"params": [weight, other]}], seed=0, **SETTINGS))
        factor = torch.full((300,), float("nan") if poison == "loss" else 1.0)
        if poison == "gradient":
            weight.register_hook(lambda grad: grad * float("inf"))
        loss = (weight * factor + other).sum()
        with hooks.enabled(loss):
            loss.backward()
        assert torch.equal(weight.detach(), torch.ones(300))
        assert torch.equal(other.detach(), torch.ones(300)) is (poison == "loss")
        assert not torch.isfinite(hooks.grad_norm + loss)


def test_gradients_of_the_warmup_are_freed_without_an_update(plan: Plan, short_store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, {**BF16, **IN_BACKWARD}), short_store, tmp_path)
    before = trained_weights(run)
    run.engine.model(run.batches()[0]).backward()
    assert all(weight.grad is None for weight in run.engine.trained_parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in trained_weights(run).items())


def test_out_of_memory_in_backward_leaves_weights_half_updated(
    plan: Plan, short_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(vary(plan, {**BF16, **IN_BACKWARD}), short_store, tmp_path)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ChunkedAdamW, "update", fail)
    with pytest.raises(HalfUpdatedError):
        train_recorded(run)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_stochastic_rounding_learns_like_fp32_master_weights(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most updates are smaller than half a step of BF16: rounding to nearest loses them."""
    master = train_language_model(torch.float32, seed)
    assert train_language_model(torch.bfloat16, seed) == pytest.approx(master, rel=0.01)
    monkeypatch.setattr(chunked_adamw, "round_stochastically", lambda values, *_: values.bfloat16())
    assert train_language_model(torch.bfloat16, seed) > 1.02 * master


def train_language_model(dtype: torch.dtype, seed: int) -> float:
    """Train all weights, stored in `dtype` and computed in FP32, on a few sequences; return the last losses' mean."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(make_config(num_hidden_layers=1)).float()
    weights = {name: nn.Parameter(weight.detach().to(dtype)) for name, weight in model.named_parameters()}
    optimizer = ChunkedAdamW([{"params": list(weights.values())}], seed=seed, **{**SETTINGS, "lr": 1e-4})
    tokens = torch.randint(0, model.config.vocab_size, (4, 32))
    losses = []
    for _ in range(80):
        computed = {name: weight.float() for name, weight in weights.items()}
        loss = functional_call(model, computed, kwargs={"input_ids": tokens, "labels": tokens}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_paged_moments_and_updates_in_backward_on_a_gpu(store: Store, tmp_path: Path) -> None:
    """Planned from a manifest: moments in pinned memory, no gradient left, weights as with updates after backward."""
    sizes = {"hidden_size": 128, "head_dim": 64, "vocab_size": 2048, "intermediate_size": 1024}
    base = write_base(tmp_path / "base", make_config(**sizes))
    chosen = {"bf16_stochastic_round": True, "max_grad_norm": 0, "torch_compile_mode": "default"}  # no CUDA graph
    weights = []
    paged: dict[str, Any] = {"optim": "paged_adamw_8bit", "optimizer_in_bwd": True}
    for index, changes in enumerate((paged, {"optim": "adamw_bnb_8bit"})):
        run = build(plan_family(base, "full", **chosen, **changes), store, tmp_path / str(index))
        before = {name: weight.float() for name, weight in trained_weights(run).items()}
        assert all(isfinite(loss) for loss in train_recorded(run).losses)
        assert all(weight.grad is None for weight in run.engine.trained_parameters())
        states = list(unwrap_optimizer(run.engine.optimizer).state.values())
        assert {state["state1"].dtype for state in states} == {torch.uint8, torch.float32}
        assert any(state["state1"].is_pinned() for state in states if not state["state1"].is_cuda) is (index == 0)
        weights.append({name: weight.float() for name, weight in trained_weights(run).items()})
    assert (
        moved_difference(weights[0], weights[1], before) < 0.2
    )  # elements with tiny gradients may move in the other direction
