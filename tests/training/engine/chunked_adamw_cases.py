"""ChunkedAdamW with the 8-bit moments of bitsandbytes. Run by test_nf4.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn

from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine import chunked_adamw
from launcher.training.engine.chunked_adamw import ChunkedAdamW
from launcher.training.engine.optimizer import list_embeddings, unwrap_optimizer
from tests.training.builders import adapt, build, split, train_recorded, trained_weights, vary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ((64, 300), (67, 67), (100,), (70_000, 2))  # the third has FP32 moments
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
BF16 = dict.fromkeys((f"precision.{name}_dtype" for name in ("base", "trainable", "compute")), "bf16")
FULL = {**adapt("full"), **split(4, 1), "optimizer.max_grad_norm": None, "schedule.max_steps": 4}


def make_weights(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(DEVICE, dtype)) for size in SIZES]


def run_steps(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
        optimizer.step()
    return [weight.detach().float().cpu() for weight in weights]


@pytest.mark.parametrize("on_host", [False, True])
def test_fp32_weights_are_updated_as_by_bitsandbytes(monkeypatch: pytest.MonkeyPatch, *, on_host: bool) -> None:
    monkeypatch.setattr(chunked_adamw, "UPDATE_CHUNK", 4096)
    weights, others = make_weights(torch.float32), make_weights(torch.float32)
    groups: list[dict[str, Any]] = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:]}]
    optimizer = ChunkedAdamW(groups, seed=0, bits=8, on_host=on_host, **SETTINGS)
    plain = [{"params": others[:2], "weight_decay": 0.1}, {"params": others[2:], "weight_decay": 0.0}]
    expected = run_steps(bnb.optim.AdamW8bit(plain, **SETTINGS), others)
    for mine, other in zip(run_steps(optimizer, weights), expected, strict=True):
        torch.testing.assert_close(mine, other)
    dtypes = [optimizer.state[weight]["state1"].dtype for weight in weights]
    assert dtypes == [torch.uint8, torch.uint8, torch.float32, torch.uint8]
    if on_host and DEVICE == "cuda":
        assert optimizer.state[weights[3]]["state1"].is_pinned()
        assert optimizer.state[weights[0]]["state1"].is_cuda, "too small"


def test_the_place_of_moments_changes_no_bit() -> None:
    results = []
    for on_host in (False, True):
        weights = make_weights(torch.bfloat16)
        optimizer = ChunkedAdamW([{"params": weights}], seed=5, bits=8, on_host=on_host, **SETTINGS)
        results.append(run_steps(optimizer, weights))
        kept = optimizer.state_dict()
        again = ChunkedAdamW([{"params": weights}], seed=5, bits=8, on_host=not on_host, **SETTINGS)
        again.load_state_dict(kept)
        for weight in weights:
            for name, value in optimizer.state[weight].items():
                loaded = again.state[weight][name]
                assert loaded == value if name == "step" else torch.equal(loaded.cpu(), value.cpu())
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.usefixtures("_without_mkldnn")
@pytest.mark.parametrize("name", [pytest.param("adamw_bnb_8bit", marks=pytest.mark.slow), "paged_adamw_8bit"])
def test_training_in_backward_equals_training_after_it(
    plan: Plan, short_store: Store, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_adamw, "_MIN_QUANTIZED", 512)  # the matrices of this base are small
    changes = {**FULL, **BF16, "batch.sequence_length": 16, "optimizer.name": name}
    after = build(vary(plan, changes), short_store, tmp_path / "after")
    within = build(vary(plan, {**changes, "optimizer.in_backward": True}), short_store, tmp_path / "within")
    losses = train_recorded(after).losses, train_recorded(within).losses
    if DEVICE == "cpu":
        assert losses[0] == losses[1]
        for weight_name, weight in trained_weights(after).items():
            assert torch.equal(trained_weights(within)[weight_name], weight), weight_name
    else:  # gradients of embeddings are atomic sums there
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    state = unwrap_optimizer(within.engine.optimizer).state
    (embedding,) = list_embeddings(within.engine.module)
    assert state[embedding]["state1"].dtype == torch.float32
    assert {each["state1"].dtype for each in state.values()} == {torch.uint8, torch.float32}
