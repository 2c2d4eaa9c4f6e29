"""The proof of products sees what a fresh adapter hides, and hands over to PEFT where ours are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config

from launcher.corpus.store import Store
from launcher.paths import RunPaths
from launcher.plan.model import CompilePlan, Plan
from launcher.training import layer_passes, products
from launcher.training.assembly import assemble
from launcher.training.blocks import Block
from launcher.training.products import ProductLinear
from launcher.training.proof import Proof
from launcher.training.run import Run
from launcher.training.starting import start
from tests.training.builders import SIZES, adapt, reset_accelerate, vary, write_base

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
JOINED = {"compile": CompilePlan(scope="layer", backend="aot_eager", mode=None)}


def put_together(
    plan: Plan, store: Store, root: Path, kind: str = "lora", changes: dict[str, Any] | None = None
) -> tuple[Run, Proof]:
    base = write_base(root / "base", Qwen3Config(**{**SIZES, "head_dim": 32}))
    varied = vary(plan, {"base.name": str(base), **adapt(kind, target_modules=ALL), **(changes or {})})
    reset_accelerate()
    return assemble(varied, RunPaths(root), store, (), start(varied))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        JOINED,
        {**JOINED, "checkpointing": "full"},
        {"adapter.dropout": 0.2},
        {**JOINED, "adapter.dropout": 0.2},
    ],
    ids=["plain", "joined", "full", "dropout", "joined, dropout"],
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_ours_are_right_and_nothing_is_left_behind(
    plan: Plan, store: Store, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    run, proof = put_together(plan, store, tmp_path, kind, changes)
    assert proof.products is not None
    assert 0 < proof.products < 1e-5
    trained = {name: one for name, one in run.engine.module.named_parameters() if one.requires_grad}
    assert all(not one.any() for name, one in trained.items() if "lora_B" in name)
    assert all(one.grad is None for one in trained.values())
    block = run.engine.module.products.blocks[0]
    assert block.dropout == (changes or {}).get("adapter.dropout", 0.0)
    assert type(block.members[0].lora_dropout["default"]) is (nn.Dropout if block.dropout else nn.Identity)
    num_in, num_out = block.members[0].in_features, sum(block.sizes)
    assert not block.matrix()[:num_out, num_in:].any(), "the blocks too are as they were"


def _break_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Block.copies
    monkeypatch.setattr(Block, "copies", lambda block: [(one, to, 2 * by) for one, to, by in own(block)])


def _break_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    own = products._Products.backward
    monkeypatch.setattr(products._Products, "backward", staticmethod(lambda *given: _doubled_last(own(*given))))


def _break_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    own = layer_passes.take_apart
    monkeypatch.setattr("launcher.training.half_operations.take_apart", lambda *given: _doubled_last(own(*given)))


def _break_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which attention's proof would see, too, and take for attention's."""
    own = layer_passes.gate
    monkeypatch.setattr(
        "launcher.training.half_operations.gate", lambda states, *given: own(states.roll(1, dims=0), *given)
    )


def _break_dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    own = products._multiply_dropped

    def multiply(block: Block, x: torch.Tensor, dropped: torch.Tensor, lengths: Any) -> Any:
        return own(block, 2 * x, dropped, lengths)

    monkeypatch.setattr(products, "_multiply_dropped", multiply)


@pytest.mark.parametrize("kernel", ["norm", "take_apart"], ids=["forward", "backward"])
def test_a_kernel_that_does_not_run_is_left_to_peft(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plan: Plan,
    store: Store,
    tmp_path: Path,
    kernel: str,
) -> None:
    def fail(*_given: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(f"launcher.training.half_operations.{kernel}", fail)
    run, proof = put_together(plan, store, tmp_path, "lora", JOINED)
    assert proof.products is None
    told = capsys.readouterr().err
    assert "our products of adapted matrices do not run here: RuntimeError: no kernel image is available" in told
    assert not any(isinstance(one, ProductLinear) for one in run.engine.module.modules())
    assert all(not one.any() for name, one in run.engine.module.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(("checkpointing", "is_joined"), [("none", True), ("full", True), ("selective", False)])
def test_where_kernels_run_layers_are_joined_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path, checkpointing: str, is_joined: bool
) -> None:
    """As on a GPU; on a CPU that does not compile, layers stay as they are."""
    monkeypatch.setattr("launcher.training.model.kernels_run_on", lambda _device: True)
    changes = {"checkpointing": checkpointing, "adapter.dropout": 0.2}
    run, proof = put_together(plan, store, tmp_path / "joined", "dora", changes)
    assert proof.products is not None
    assert proof.products < 1e-5
    assert any(hasattr(one, "launcher_norm") for one in run.engine.module.modules()) == is_joined
    monkeypatch.undo()
    run, _ = put_together(plan, store, tmp_path / "plain", "dora", changes)
    assert not any(hasattr(one, "launcher_norm") for one in run.engine.module.modules())


def _doubled_last(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*found[:-1], 2 * found[-1])


@pytest.mark.parametrize(
    ("sabotage", "changes"),
    [
        (_break_copies, {}),
        (_break_copies, JOINED),
        (_break_backward, {}),
        (_break_joined, JOINED),
        (_break_forward, JOINED),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_wrong_ones_are_left_to_peft(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plan: Plan,
    store: Store,
    tmp_path: Path,
    kind: str,
    sabotage: Any,
    changes: dict[str, Any],
) -> None:
    sabotage(monkeypatch)
    run, proof = put_together(plan, store, tmp_path, kind, changes)
    assert proof.products is None
    assert "our products of adapted matrices have other gradients here than PEFT's" in capsys.readouterr().err
    assert not any(isinstance(one, ProductLinear) for one in run.engine.module.modules())
    if changes:  # compiling takes long, and who multiplies is seen above
        return
    run.engine.module.products.refresh()
    broken = _gradients(run)
    monkeypatch.undo()
    right, _ = put_together(plan, store, tmp_path / "right", kind, changes)
    torch.testing.assert_close(broken, _gradients(right), rtol=1e-4, atol=1e-6)


def _gradients(run: Run) -> dict[str, torch.Tensor]:
    batch = next(iter(run.batches()))
    run.engine.micro_step(batch, 10, is_last=True)
    return {name: one.grad for name, one in run.engine.module.named_parameters() if one.grad is not None}


def test_what_is_wrong_behind_dropout_alone_is_seen(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    _break_dropping(monkeypatch)
    _, proof = put_together(plan, store, tmp_path, "dora", {"adapter.dropout": 0.2})
    assert proof.products is None
