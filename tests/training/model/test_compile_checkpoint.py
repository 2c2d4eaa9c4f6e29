"""Activation checkpointing and torch.compile do not change results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.core import metrics
from launcher.core.choices import Checkpointing
from launcher.core.errors import InputError
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.data.collate import PackedBatch
from launcher.training.engine.run import TrainingRun
from launcher.training.model.attention import BACKENDS, Backend
from launcher.training.model.packed_lm import PackedCausalLM
from launcher.training.monitoring.runtime_report import count_compiled_graphs
from launcher.training.warmup_step import run_warmup_step
from tests.training.builders import (
    adapt,
    build,
    gradients,
    make_config,
    make_document,
    pack_singly,
    relative_difference,
    split,
    train_recorded,
    vary,
    wake_adapter,
    write_base,
    write_store,
)

# The same operations in the same order, but fused or split otherwise by the compiler: units in the last place of fp32.
COMPILED_TOLERANCE = 1e-6
# Gradients are sums that cancel in part.
COMPILED_GRADIENT_TOLERANCE = 1e-5

COMPILE = {"scope": "layer", "backend": "aot_eager", "mode": None}  # everything except code generation, for speed
TRACE = {**COMPILE, "backend": "eager"}  # graph capture only


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr("launcher.training.model.compile_checkpoint._CompileSwitch.is_on", True)


class Operations(TorchDispatchMode):
    """Counts the executed ops, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        self.counts[str(function).split(".")[1]] += 1
        return function(*arguments, **(more or {}))

    @property
    def products(self) -> int:
        return self.counts["mm"] + self.counts["addmm"]

    @property
    def attentions(self) -> int:
        names = [name for name in self.counts if name.startswith("_scaled_dot_product") and "backward" not in name]
        return sum(self.counts[name] for name in names)


def step_once(run: TrainingRun) -> tuple[float, dict[str, Tensor]]:
    wake_adapter(run)
    loss = run.engine.micro_step(run.batches()[0], 10, is_last=True)
    return float(loss), gradients(run)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_checkpointing_is_bit_exact(plan: Plan, store: Store, tmp_path: Path, kind: str) -> None:
    kinds: tuple[Checkpointing, ...] = ("none", "selective", "full")
    found = [step_once(build(vary(plan, {**adapt(kind), "checkpointing": c}), store, tmp_path)) for c in kinds]
    loss, wanted = found[0]
    for other_loss, grads in found[1:]:
        assert other_loss == loss
        assert all(torch.equal(grads[name], wanted[name]) for name in wanted)


def test_checkpointing_does_not_change_training(plan: Plan, store: Store, tmp_path: Path) -> None:
    """With dropout: recomputation uses the same mask."""
    kinds: tuple[Checkpointing, ...] = ("none", "selective", "full")
    plans = [vary(plan, {"adapter.dropout": 0.3, "checkpointing": c, "schedule.max_steps": 4}) for c in kinds]
    losses = [train_recorded(build(one, store, tmp_path)).losses for one in plans]
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


def test_checkpointing_recomputes_the_planned_ops(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    """Full: everything. Selective: neither attention nor matmuls with a long inner dimension."""
    monkeypatch.setattr("launcher.training.model.compile_checkpoint.SELECTIVE_MIN_INNER", 32)
    seen: dict[Checkpointing, Operations] = {}
    for checkpointing in ("none", "selective", "full"):
        run = build(vary(plan, {"checkpointing": checkpointing}), store, tmp_path)
        with Operations() as seen[checkpointing]:
            step_once(run)
    layers = len(run.engine.module.layers)
    assert seen["none"].attentions >= layers
    assert seen["selective"].attentions == seen["none"].attentions
    assert seen["full"].attentions == 2 * seen["none"].attentions
    # A layer has four blocks of matrices. Two multiply by LoRA's first matrix and then by all else; two by a weight, by
    # LoRA's first matrix and by its second, whose inner size is 4. Recomputing may end early, where no more is needed.
    assert seen["none"].products < seen["selective"].products <= seen["none"].products + 2 * layers
    assert seen["none"].products + 8 * layers <= seen["full"].products <= seen["none"].products + 10 * layers


def test_evaluation_recomputes_nothing(plan: Plan, store: Store, tmp_path: Path) -> None:
    counts = []
    for checkpointing in ("none", "full"):
        run = build(vary(plan, {"checkpointing": checkpointing}), store, tmp_path)
        with run.engine.eval_mode(), Operations() as seen:
            run.engine.model(run.batches()[0])
        counts.append((seen.attentions, seen.products))
    assert counts[0] == counts[1]


# torch.compile -------------------------------------------------------------------------------------------------------


def varlen_like() -> Backend:
    """A backend with cu_seqlens like the varlen kernels, from plain ops that the compiler can trace."""

    def build_metadata(batch: PackedBatch) -> dict[str, Any]:
        return {"cu_seqlens": batch.cu_seqlens, "max_length": batch.max_length}

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: dict[str, Any],
        scaling: float | None,
        _softcap: float | None,
        _window: int | None,
    ) -> Tensor:
        assert documents["max_length"] > 0
        places = torch.arange(query.shape[2])
        document = torch.searchsorted(documents["cu_seqlens"][1:].long(), places, right=True)
        visible = (document[:, None] == document[None, :]) & (places[:, None] >= places[None, :])
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        weights = query @ key.transpose(2, 3) * (scaling or 1.0)
        weights = weights.masked_fill(~visible, float("-inf"))
        return (torch.softmax(weights, dim=-1) @ value).transpose(1, 2)

    return Backend(kernel=kernel, build_metadata=build_metadata)


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.slow), "selective", "full"])
def test_compiled_layers_do_not_change_training(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path, checkpointing: Checkpointing
) -> None:
    """One graph without breaks serves all layers, micro-batches and steps."""
    monkeypatch.setitem(BACKENDS, "sdpa", varlen_like())
    plain = vary(plan, {**adapt("full"), "checkpointing": checkpointing, "schedule.max_steps": 3, **split(2, 2)})
    eager = train_recorded(build(plain, store, tmp_path))
    assert count_compiled_graphs() == (0, 0)
    compiled = train_recorded(build(vary(plain, {"compile": COMPILE}), store, tmp_path))
    assert compiled.losses == pytest.approx(eager.losses, rel=COMPILED_TOLERANCE)
    norms = compiled.values(metrics.GRAD_NORM)
    assert norms == pytest.approx(eager.values(metrics.GRAD_NORM), rel=COMPILED_GRADIENT_TOLERANCE)
    assert count_compiled_graphs() == (1, 0)


def test_compiled_adapter_has_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    """Two graphs for four layers: the input of the first layer needs no gradient, because embeddings are frozen."""
    monkeypatch.setitem(BACKENDS, "sdpa", varlen_like())
    base = write_base(tmp_path / "base", make_config(num_hidden_layers=4))
    plain = vary(plan, {"base.name": str(base), "adapter.target_modules": ("q_proj", "down_proj")})
    loss, wanted = step_once(build(plain, store, tmp_path))
    compiled_loss, found = step_once(build(vary(plain, {"compile": COMPILE}), store, tmp_path))
    assert compiled_loss == pytest.approx(loss, rel=COMPILED_TOLERANCE)
    assert relative_difference(found, wanted) < COMPILED_GRADIENT_TOLERANCE
    assert count_compiled_graphs() == (2, 0)


@pytest.mark.slow
def test_compiled_model_does_not_change_training(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", varlen_like())
    plain = vary(plan, {**adapt("full"), "schedule.max_steps": 3})
    eager = train_recorded(build(plain, store, tmp_path))
    compiled = train_recorded(build(vary(plain, {"compile": {**TRACE, "scope": "model"}}), store, tmp_path))
    assert compiled.losses == pytest.approx(eager.losses, rel=COMPILED_TOLERANCE)
    assert int(counters["stats"]["unique_graphs"]) >= 1


def test_unpacked_rows_compile_one_graph_per_size(monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path) -> None:
    """There are at most eight sizes (test_collate.py), below the compiler's limit."""
    monkeypatch.setitem(BACKENDS, "sdpa", varlen_like())
    lengths = (5, 8, 7, 30, 31, 60, 64, 6)
    store = write_store(tmp_path / "store", pack_singly(make_document(length, 3, length) for length in lengths))
    changes = {**adapt("full"), "batch.packed": False, "compile": TRACE, "batch.global_batch_size": 1, **split(1, 1)}
    run = build(vary(plan, {**changes, "schedule.epochs": 1.0}), store, tmp_path)
    batches = run.batches()
    assert sorted({batches[index].input_ids.shape[1] for index in range(len(batches))}) == [8, 32, 64]
    train_recorded(run)
    assert count_compiled_graphs() == (3, 0)


def test_grouped_attention_is_excluded_from_compilation(plan: Plan, store: Store, tmp_path: Path) -> None:
    """Groups of documents differ between batches."""
    plain = vary(plan, {**adapt("full"), "schedule.max_steps": 3})
    eager = train_recorded(build(plain, store, tmp_path))
    compiled = train_recorded(build(vary(plain, {"compile": TRACE}), store, tmp_path))
    assert compiled.losses == pytest.approx(eager.losses, rel=COMPILED_TOLERANCE)
    assert 1 <= int(counters["stats"]["unique_graphs"]) <= 4, "however many batches there were"


def test_failed_compilation_falls_back_to_eager(
    plan: Plan, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    torch._dynamo.register_backend(refuse, name="launcher_test_refuses")
    plain = vary(plan, {"schedule.max_steps": 2})
    eager = train_recorded(build(plain, store, tmp_path))
    broken = vary(plain, {"compile": {**COMPILE, "backend": "launcher_test_refuses"}})
    compiled = train_recorded(build(broken, store, tmp_path))
    assert compiled.losses == eager.losses
    assert capsys.readouterr().err.count("torch.compile failed, continuing without it") == 1


def test_unknown_compiler_backend_is_refused(plan: Plan, store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="torch_compile_backend: torch has no compiler backend inducter") as refused:
        build(vary(plan, {"compile": {**COMPILE, "backend": "inducter"}}), store, tmp_path)
    assert "inductor" in refused.value.hint


@pytest.mark.slow
def test_warmup_step_does_not_change_training(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", varlen_like())
    varied = vary(plan, {"compile": COMPILE, "schedule.max_steps": 3, "adapter.dropout": 0.2})
    plain = train_recorded(build(varied, store, tmp_path / "a")).losses
    run = build(varied, store, tmp_path / "b")
    compilation = run_warmup_step(run)
    assert compilation.description.startswith("per layer: ")
    assert compilation.graphs
    assert not compilation.has_failed
    assert all(parameter.grad is None for parameter in run.engine.module.parameters())
    assert train_recorded(run).losses == plain


@pytest.mark.slow
def test_failed_backward_compilation_falls_back_to_eager(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backward is compiled when it first runs, where the forward cannot catch the error."""

    def broken(*_graph_and_inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    backend = aot_autograd(fw_compiler=lambda graph, _inputs: graph, bw_compiler=broken)
    torch._dynamo.register_backend(backend, name="broken_backward")
    monkeypatch.setitem(BACKENDS, "sdpa", varlen_like())
    plain = vary(plan, {"schedule.max_steps": 2})
    wanted = train_recorded(build(plain, store, tmp_path / "a")).losses
    run = build(vary(plain, {"compile": {**COMPILE, "backend": "broken_backward"}}), store, tmp_path / "b")
    compilation = run_warmup_step(run)
    assert (compilation.has_failed, compilation.graphs) == (True, None)
    assert compilation.description == "failed; training without it"
    assert "torch.compile failed, continuing without it: " in capsys.readouterr().err
    assert train_recorded(run).losses == pytest.approx(wanted, rel=COMPILED_TOLERANCE)


def test_weights_of_zero3_share_one_compiled_graph() -> None:
    """DeepSpeed's linear function asks each weight for its id; torch 2.11 would compile it for every layer."""
    from deepspeed.runtime.zero import linear as deepspeed_linear

    module: Any = SimpleNamespace(layers=[], base=SimpleNamespace(enable_input_require_grads=lambda: None))
    PackedCausalLM._gather_by_layer(module)
    counter = CompileCounter()
    compiled = torch.compile(deepspeed_linear.zero3_linear_wrap, backend=counter)
    for number in range(3):
        weight: Any = nn.Parameter(torch.randn(4, 4))
        weight.ds_id, weight.ds_status = number, SimpleNamespace(name="AVAILABLE")
        compiled(torch.randn(2, 4, requires_grad=True), weight).sum().backward()
    assert counter.frame_count == 1
    assert deepspeed_linear.is_zero_param(weight)
