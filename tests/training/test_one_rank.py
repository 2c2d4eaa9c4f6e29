"""Engines of one rank, in this process: what they do to compiled layers and to the pass that compiles them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from launcher.corpus.store import Store
from launcher.plan.model import CompilePlan, Plan
from launcher.training.model.compile_checkpoint import prepare_layers
from launcher.training.warmup_step import run_warmup_step
from tests.training.builders import adapt, build, vary

COMPILE = {"scope": "layer", "backend": "aot_eager", "mode": None}


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Layer(nn.Module):
    """More weights than DDP's first bucket, and than its second: 25 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(self.up(hidden).relu())
        return out


@pytest.mark.usefixtures("_one_rank")
def test_ddp_leaves_a_layer_in_one_piece() -> None:
    layers = nn.Sequential(Layer(), Layer())
    prepare_layers(list(layers), "none", CompilePlan(scope="layer", backend="aot_eager", mode=None))
    counters.clear()
    DistributedDataParallel(layers)(torch.randn(4, 1024, requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["aot_autograd"]["total"] == 1


@pytest.mark.usefixtures("_one_rank")
def test_compiling_ahead_leaves_no_whole_gradients_under_fsdp2(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, store: Store, tmp_path: Path
) -> None:
    run = build(vary(plan, {**adapt("full"), "compile": COMPILE}), store, tmp_path / "run", is_checked=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    for module in (*run.engine.module.layers, run.engine.module):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    monkeypatch.setattr(run.engine.accelerator, "no_sync", no_sync)
    run_warmup_step(run)
    assert count_whole_gradients(run.engine.module) == 0
    with no_sync(run.engine.module):
        run.engine.module(run.batches()[0]).backward()
    assert count_whole_gradients(run.engine.module) > 0  # else nothing was looked at


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """As accelerate does where it knows that it runs FSDP2."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def count_whole_gradients(model: nn.Module) -> int:
    found = 0
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            parameters = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
            found += sum(parameter.unsharded_accumulated_grad is not None for parameter in parameters)
    return found
