"""Prepared parameters are compared with the plan, on one rank of a real process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from launcher.core.errors import ExitCode, TopologyError
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine.engine import Engine
from launcher.training.topology_check import check_engine
from tests.training.builders import build, vary


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine(plan: Plan, store: Store, tmp_path: Path) -> Engine:
    return build(plan, store, tmp_path / "run").engine


def refusals(plan: Plan, engine: Engine) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        check_engine(plan, engine)
    assert caught.value.exit_code == ExitCode.WRONG_TOPOLOGY
    return [str(problem) for problem in caught.value.problems]


def shard(engine: Engine, names: tuple[str, ...] | None = None) -> None:
    """Replace parameters by DTensors, as FSDP2 does."""
    mesh = init_device_mesh("cpu", (1,))
    for prefix, module in list(engine.module.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if names is None or f"{prefix}.{name}" in names:
                whole = torch.nn.Parameter(distribute_tensor(parameter.data, mesh), parameter.requires_grad)
                module.register_parameter(name, whole)


def count(engine: Engine) -> int:
    return len(list(engine.module.parameters()))


def test_an_engine_as_planned_passes(plan: Plan, engine: Engine) -> None:
    check_engine(plan, engine)


def test_another_optimizer_than_planned_is_refused(plan: Plan, engine: Engine) -> None:
    with pytest.raises(TopologyError, match="AdamW runs, ChunkedAdamW is planned"):
        check_engine(vary(plan, {"optimizer.in_backward": True}), engine)


def test_unsharded_parameters_are_refused_with_fsdp2(plan: Plan, engine: Engine) -> None:
    said = refusals(vary(plan, {"strategy": "fsdp2"}), engine)
    assert said == [f"shards: 0 of {count(engine)} parameters are sharded"]


@pytest.mark.usefixtures("_group")
def test_sharded_parameters_are_refused_without_fsdp2(plan: Plan, engine: Engine) -> None:
    shard(engine)
    assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())
    check_engine(vary(plan, {"strategy": "fsdp2"}), engine)
    assert refusals(plan, engine) == [f"shards: {count(engine)} of {count(engine)} parameters are sharded"]


@pytest.mark.usefixtures("_group")
def test_a_mesh_without_replicas_is_refused_with_hsdp(plan: Plan, engine: Engine) -> None:
    shard(engine)
    hsdp = vary(plan, {"strategy": "hsdp", "hardware.nodes": 2, "hardware.gpus_per_node": 4})
    assert refusals(hsdp, engine) == ["mesh: parameters are sharded over a mesh of (1,), (2, 4) is planned"]


@pytest.mark.usefixtures("_group")
def test_one_unsharded_parameter_is_refused(plan: Plan, engine: Engine) -> None:
    """A wrap policy that misses a module."""
    names = [name for name, _ in engine.module.named_parameters()]
    shard(engine, tuple(names[1:]))
    total = count(engine)
    assert refusals(vary(plan, {"strategy": "fsdp2"}), engine) == [
        f"shards: {total - 1} of {total} parameters are sharded"
    ]


def test_unpartitioned_parameters_are_refused_with_zero3(plan: Plan, engine: Engine) -> None:
    """DeepSpeed does not run either, which is reported without a traceback."""
    assert refusals(vary(plan, {"strategy": "zero3"}), engine) == [
        f"partitions: 0 of {count(engine)} parameters are partitioned",
        "engine: DeepSpeed does not run, zero3 is planned",
    ]


@pytest.mark.usefixtures("_group")
def test_partitioned_parameters_are_refused_without_zero3(
    plan: Plan, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    deepspeed: Any = pytest.importorskip("deepspeed")
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", {})  # as in training: gloo, no compiled collectives
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)  # what it makes of it ends with this test
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    deepspeed.zero.Init(module=engine.module, config_dict_or_path={"train_batch_size": 1}, dtype=torch.float32)
    assert f"partitions: {count(engine)} of {count(engine)} parameters are partitioned" in refusals(plan, engine)
