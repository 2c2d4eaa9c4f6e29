"""The LoRA gradient check detects wrong kernels, also with a new adapter, and falls back to PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.model import CompilePlan, Plan
from launcher.training.build import build_run
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.engine.run import TrainingRun
from launcher.training.kernels import elementwise
from launcher.training.model.fused_lora import linear
from launcher.training.model.fused_lora.linear import FusedLoraLinear
from launcher.training.model.fused_lora.weights import FusedLoraWeights
from launcher.training.verify import lora_grads
from launcher.training.verify.packing import PackingCheck
from tests.training.builders import SIZES, adapt, reset_accelerate, vary, write_base

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED_BLOCKS = {"compile": CompilePlan(scope="layer", backend="aot_eager", mode=None)}


def build_checked_run(
    plan: Plan,
    store: Store,
    root: Path,
    kind: str = "lora",
    changes: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> tuple[TrainingRun, PackingCheck]:
    base = write_base(root / "base", Qwen3Config(**{**SIZES, "head_dim": 32, **(config or {})}))
    varied = vary(plan, {"base.name": str(base), **adapt(kind, target_modules=ALL), **(changes or {})})
    reset_accelerate()
    return build_run(varied, RunPaths(root), store, (), build_accelerator(varied))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FUSED_BLOCKS,
        {**FUSED_BLOCKS, "checkpointing": "full"},
        {"adapter.dropout": 0.2},
        {**FUSED_BLOCKS, "adapter.dropout": 0.2},
    ],
    ids=["plain", "fused blocks", "full checkpointing", "dropout", "fused blocks, dropout"],
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_check_passes_and_restores_the_model(
    plan: Plan, store: Store, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    run, check = build_checked_run(plan, store, tmp_path, kind, changes)
    assert check.lora_grads is not None
    assert 0 < check.lora_grads < 1e-5
    trained = {name: one for name, one in run.engine.module.named_parameters() if one.requires_grad}
    assert all(not one.any() for name, one in trained.items() if "lora_B" in name)
    assert all(one.grad is None for one in trained.values())
    weights = run.engine.module.fused_lora.weights[0]
    assert weights.dropout == (changes or {}).get("adapter.dropout", 0.0)
    assert type(weights.members[0].lora_dropout["default"]) is (nn.Dropout if weights.dropout else nn.Identity)
    num_in, num_out = weights.members[0].in_features, sum(weights.shape.out_features)
    assert not weights.materialize()[:num_out, num_in:].any(), "B must be zero in the fused weight again"


def _break_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FusedLoraWeights.list_copies
    monkeypatch.setattr(
        FusedLoraWeights, "list_copies", lambda weights: [one._replace(scale=2 * one.scale) for one in own(weights)]
    )


def _break_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    own = linear._FusedLoraMatmul.backward
    monkeypatch.setattr(linear._FusedLoraMatmul, "backward", staticmethod(lambda *args: _double_last(own(*args))))


def _break_fused_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    own = elementwise.split_lora_grads
    monkeypatch.setattr(
        "launcher.training.kernels.fused_layer_ops.split_lora_grads", lambda *args: _double_last(own(*args))
    )


def _break_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention check would detect this too, and blame attention."""
    own = elementwise.swiglu

    def shift_rows(states: torch.Tensor, *args: Any, **options: Any) -> Any:
        return own(states.roll(1, dims=0), *args, **options)

    monkeypatch.setattr("launcher.training.kernels.fused_layer_ops.swiglu", shift_rows)


def _break_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    own = linear._apply_dora_with_dropout

    def multiply(weights: FusedLoraWeights, x: torch.Tensor, dropped: torch.Tensor, lengths: Any) -> Any:
        return own(weights, 2 * x, dropped, lengths)

    monkeypatch.setattr(linear, "_apply_dora_with_dropout", multiply)


@pytest.mark.parametrize(
    "kernel", ["fused_projections.rms_norm", "fused_layer_ops.split_lora_grads"], ids=["forward", "backward"]
)
def test_failing_kernel_falls_back_to_peft(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plan: Plan,
    store: Store,
    tmp_path: Path,
    kernel: str,
) -> None:
    def fail(*_args: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(f"launcher.training.kernels.{kernel}", fail)
    run, check = build_checked_run(plan, store, tmp_path, "lora", FUSED_BLOCKS)
    assert check.lora_grads is None
    warning = capsys.readouterr().err
    assert "fused LoRA layers fail on this machine: RuntimeError: no kernel image is available" in warning
    assert not any(isinstance(one, FusedLoraLinear) for one in run.engine.module.modules())
    assert all(not one.any() for name, one in run.engine.module.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(("checkpointing", "is_fused"), [("none", True), ("full", True), ("selective", False)])
def test_blocks_are_fused_without_compilation_where_kernels_run(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path, checkpointing: str, is_fused: bool
) -> None:
    """As on a GPU. On a CPU without torch.compile, blocks are not fused."""
    monkeypatch.setattr("launcher.training.model.packed_lm.supports_triton", lambda _device: True)
    changes = {"checkpointing": checkpointing, "adapter.dropout": 0.2}
    run, check = build_checked_run(plan, store, tmp_path / "joined", "dora", changes)
    assert check.lora_grads is not None
    assert check.lora_grads < 1e-5
    assert any(hasattr(one, "preceding_norm") for one in run.engine.module.modules()) == is_fused
    monkeypatch.undo()
    run, _ = build_checked_run(plan, store, tmp_path / "plain", "dora", changes)
    assert not any(hasattr(one, "preceding_norm") for one in run.engine.module.modules())


def _double_last(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*found[:-1], 2 * found[-1])


# The kind of each that `make test` runs; the others with `make test-all`.
SABOTAGES: tuple[tuple[Any, dict[str, Any], str], ...] = (
    (_break_copies, {}, "dora"),
    (_break_copies, FUSED_BLOCKS, "lora"),
    (_break_backward, {}, "lora"),
    (_break_fused_backward, FUSED_BLOCKS, "dora"),
    (_break_forward, FUSED_BLOCKS, "lora"),
)


@pytest.mark.parametrize(
    ("kind", "sabotage", "changes"),
    [
        pytest.param(kind, sabotage, changes, marks=[] if kind == fast else [pytest.mark.slow])
        for kind in ("lora", "dora")
        for sabotage, changes, fast in SABOTAGES
    ],
)
def test_wrong_gradients_fall_back_to_peft(
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
    run, check = build_checked_run(plan, store, tmp_path, kind, changes)
    assert check.lora_grads is None
    assert "fused LoRA layers have different gradients than PEFT" in capsys.readouterr().err
    assert not any(isinstance(one, FusedLoraLinear) for one in run.engine.module.modules())
    if changes:  # compiling takes long, and the classes were checked above
        return
    run.engine.module.fused_lora.refresh()
    broken = _gradients(run)
    monkeypatch.undo()
    right, _ = build_checked_run(plan, store, tmp_path / "right", kind, changes)
    torch.testing.assert_close(broken, _gradients(right), rtol=1e-4, atol=1e-6)


def _gradients(run: TrainingRun) -> dict[str, torch.Tensor]:
    batch = next(iter(run.batches()))
    run.engine.micro_step(batch, 10, is_last=True)
    return {name: one.grad for name, one in run.engine.module.named_parameters() if one.grad is not None}


def test_error_in_dropout_alone_is_detected(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    _break_dropout(monkeypatch)
    _, check = build_checked_run(plan, store, tmp_path, "dora", {"adapter.dropout": 0.2})
    assert check.lora_grads is None


BF16 = {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16", "batch.sequence_length": 16}

VARIANTS = {
    "plain": BF16,
    "checkpointing": {**BF16, "checkpointing": "full"},
    "selective": {**BF16, "checkpointing": "selective"},
    "blocks": {**BF16, **FUSED_BLOCKS, "adapter.dropout": 0.2},
}


# Each kind and each variant; the rest with `make test-all`, because BF16 is slow on a CPU.
FAST_VARIANTS = (("lora", "blocks"), ("lora", "checkpointing"), ("dora", "plain"), ("dora", "selective"))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(
            kind, changes, id=f"{kind}-{name}", marks=[] if (kind, name) in FAST_VARIANTS else [pytest.mark.slow]
        )
        for kind in ("lora", "dora")
        for name, changes in VARIANTS.items()
    ],
)
def test_bf16_gradients_are_compared_with_fp32(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, short_store: Store, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    references: list[Any] = []
    own = lora_grads._try_exact_grads

    def record(*args: Any) -> Any:
        references.append(own(*args))
        return references[-1]

    monkeypatch.setattr(lora_grads, "_try_exact_grads", record)
    run, check = build_checked_run(plan, short_store, tmp_path, kind, changes)
    assert check.lora_grads is not None
    assert 1e-4 < check.lora_grads < 0.1
    (exact,) = references
    assert exact is not None
    others = {key: value for key, value in changes.items() if not key.startswith("precision")}
    fp32, _ = build_checked_run(plan, short_store, tmp_path / "fp32", kind, others)
    rounded = dict(run.engine.module.named_parameters())
    with torch.no_grad():
        for name, parameter in fp32.engine.module.named_parameters():
            parameter.copy_(rounded[name])  # the same weights, so that only the computation differs
    kinds: list[Any] = []

    def record_kinds(*args: Any) -> float:
        kinds.append(args)
        return 0.0

    monkeypatch.setattr(lora_grads, "_largest_difference", record_kinds)
    lora_grads.check_lora_grads(fp32.plan, fp32.engine.module, fp32.train.file, torch.device("cpu"))
    (_, reference), *_ = kinds
    differences = [lora_grads._relative_difference(exact[name], reference[name]) for name in reference]
    assert max(differences) < 1e-4


@pytest.mark.parametrize("factor", [1.1, pytest.param(3.0, marks=pytest.mark.slow)])
def test_gradients_farther_from_fp32_than_pefts_are_refused(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, short_store: Store, tmp_path: Path, factor: float
) -> None:
    """Errors of 10 % would be within an absolute tolerance of 0.25."""
    own: Any = linear._FusedLoraMatmul.backward

    def multiply_last(*args: Any) -> Any:
        grads = own(*args)
        return (*grads[:-1], factor * grads[-1])

    monkeypatch.setattr(linear._FusedLoraMatmul, "backward", staticmethod(multiply_last))
    _, check = build_checked_run(plan, short_store, tmp_path, "lora", BF16)
    assert check.lora_grads is None


@pytest.mark.parametrize("changes", [{}, FUSED_BLOCKS], ids=["plain", "fused blocks"])
def test_fused_attention_uses_the_sliding_window(
    plan: Plan, store: Store, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The check compares with transformers' own layers, which mask tokens outside the window."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    run, check = build_checked_run(plan, store, tmp_path, "lora", changes, windows)
    layers: list[Any] = run.engine.module.layers
    assert [layer.self_attn.sliding_window for layer in layers] == [None, 6]
    assert any(hasattr(one, "preceding_norm") for one in run.engine.module.modules()) == bool(changes)
    assert check.lora_grads is not None
    assert check.lora_grads < 1e-5


def test_forgotten_window_is_detected(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    register = ALL_ATTENTION_FUNCTIONS.register

    def register_forgetful(name: str, attend: Any) -> None:
        def forget(module: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(module, "preceding_norm") and module._get_active_weights():
                kwargs.pop("sliding_window", None)
            return attend(module, *args, **kwargs)

        register(name, forget)

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "register", register_forgetful)
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    _, check = build_checked_run(plan, store, tmp_path, "lora", FUSED_BLOCKS, windows)
    assert check.lora_grads is None
