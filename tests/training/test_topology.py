"""What became of parameters behind preparation, against the plan: each count fires, on one rank of a real group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from launcher.corpus.store import Store
from launcher.errors import ExitCode, TopologyError
from launcher.plan.model import Plan
from launcher.training.engine import Engine
from launcher.training.topology import check_prepared
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
        check_prepared(plan, engine)
    assert caught.value.exit_code == ExitCode.WRONG_TOPOLOGY
    return [str(problem) for problem in caught.value.problems]


def shard(engine: Engine, names: tuple[str, ...] | None = None) -> None:
    """As FSDP2 leaves them: DTensors in the modules' own places."""
    mesh = init_device_mesh("cpu", (1,))
    for prefix, module in list(engine.module.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if names is None or f"{prefix}.{name}" in names:
                whole = torch.nn.Parameter(distribute_tensor(parameter.data, mesh), parameter.requires_grad)
                module.register_parameter(name, whole)


def count(engine: Engine) -> int:
    return len(list(engine.module.parameters()))


def test_as_planned(plan: Plan, engine: Engine) -> None:
    check_prepared(plan, engine)


def test_nothing_is_sharded_under_fsdp2(plan: Plan, engine: Engine) -> None:
    said = refusals(vary(plan, {"strategy": "fsdp2"}), engine)
    assert said == [f"shards: 0 of {count(engine)} parameters are sharded"]


@pytest.mark.usefixtures("_group")
def test_everything_is_sharded_without_a_plan_for_it(plan: Plan, engine: Engine) -> None:
    shard(engine)
    assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())
    check_prepared(vary(plan, {"strategy": "fsdp2"}), engine)
    assert refusals(plan, engine) == [f"shards: {count(engine)} of {count(engine)} parameters are sharded"]


@pytest.mark.usefixtures("_group")
def test_one_parameter_that_stayed_whole(plan: Plan, engine: Engine) -> None:
    """A wrap policy that misses a module."""
    names = [name for name, _ in engine.module.named_parameters()]
    shard(engine, tuple(names[1:]))
    total = count(engine)
    assert refusals(vary(plan, {"strategy": "fsdp2"}), engine) == [
        f"shards: {total - 1} of {total} parameters are sharded"
    ]


def test_nothing_is_partitioned_under_zero3(plan: Plan, engine: Engine) -> None:
    """Nor does DeepSpeed run: that is told too, and no traceback."""
    assert refusals(vary(plan, {"strategy": "zero3"}), engine) == [
        f"partitions: 0 of {count(engine)} parameters are partitioned",
        "engine: DeepSpeed does not run, zero3 was planned",
    ]


@pytest.mark.usefixtures("_group")
def test_everything_is_partitioned_without_a_plan_for_it(
    plan: Plan, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    deepspeed: Any = pytest.importorskip("deepspeed")
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)  # what it makes of it ends with this test
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    deepspeed.zero.Init(module=engine.module, config_dict_or_path={"train_batch_size": 1}, dtype=torch.float32)
    assert f"partitions: {count(engine)} of {count(engine)} parameters are partitioned" in refusals(plan, engine)
