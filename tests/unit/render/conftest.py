"""Plans to render. They hold only the fields that rendering reads: anything more would raise AttributeError here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from pydantic import BaseModel

from launcher.base_models.shapes import ModelShape
from launcher.core.run_paths import RunPaths
from launcher.hardware.model import Gpu, Hardware
from launcher.plan.model import BatchPlan, LoaderPlan, OptimizerPlan, Plan, PrecisionPlan, SpeedPlan

PROJECT_ROOT = Path(__file__).parents[3]
RUN_DIR = "runs/neo4j-0001"
MakePlan = Callable[..., Plan]
Model = TypeVar("Model", bound=BaseModel)


def partial(model: type[Model], **fields: Any) -> Model:
    """A value without its other fields, and without validation."""
    construct: Any = model.model_construct
    return cast(Model, construct(**fields))


def build_plan(
    *,
    strategy: str = "single",
    offload: str = "none",
    dtype: str = "bf16",
    model_type: str = "qwen3",
    interconnect: str | None = "nvlink",  # None: no GPU
    gpus: int = 1,
    nodes: int = 1,
    cores: int = 16,
    workers: int = 2,
    num_ranks: int | None = None,
    micro_batch_size: int = 4,
    accumulation: int = 2,
    max_grad_norm: float | None = 1.0,
    total_seconds: float | None = 5400.0,
    expert: str = "neo4j",
) -> Plan:
    gpu = None if interconnect is None else partial(Gpu, interconnect=interconnect)
    hardware = partial(Hardware, gpu=gpu, gpus_per_node=gpus, nodes=nodes, cpu_cores_per_node=cores)
    return partial(
        Plan,
        expert=expert,
        strategy=strategy,
        offload=offload,
        hardware=hardware,
        base=partial(ModelShape, model_type=model_type),
        precision=partial(PrecisionPlan, compute_dtype=dtype),
        batch=partial(
            BatchPlan,
            num_ranks=hardware.num_ranks if num_ranks is None else num_ranks,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation,
        ),
        loader=partial(LoaderPlan, num_workers=workers),
        optimizer=partial(OptimizerPlan, max_grad_norm=max_grad_norm),
        speed=partial(SpeedPlan, total_seconds=total_seconds),
    )


CASES: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "fp32", "interconnect": None, "gpus": 0, "cores": 2, "workers": 0, "micro_batch_size": 1},
    "ddp_4x_no_p2p": {"strategy": "ddp", "gpus": 4, "interconnect": "pcie-host", "micro_batch_size": 1},
    "fsdp2_8gpu": {"strategy": "fsdp2", "gpus": 8, "cores": 96, "workers": 4},
    "hsdp_2node": {"strategy": "hsdp", "gpus": 8, "nodes": 2, "cores": 96, "workers": 4},
    "single_gpu": {"micro_batch_size": 8, "accumulation": 1},
    "zero2_offload_fp16": {
        "strategy": "zero2",
        "offload": "optimizer",
        "dtype": "fp16",
        "gpus": 2,
        "interconnect": "pcie-host",
        "max_grad_norm": None,
        "model_type": "never_heard_of",
    },
    "zero3_2node": {"strategy": "zero3", "gpus": 8, "nodes": 2, "cores": 96, "workers": 4, "max_grad_norm": 0.3},
    "zero3_offload": {"strategy": "zero3", "offload": "optimizer_and_parameters", "total_seconds": None},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sorted(CASES))
    if "zero_case" in metafunc.fixturenames:
        metafunc.parametrize("zero_case", sorted(name for name in CASES if name.startswith("zero")))


@pytest.fixture
def plan(case: str) -> Plan:
    return build_plan(**CASES[case])


@pytest.fixture
def zero_plan(zero_case: str) -> Plan:
    return build_plan(**CASES[zero_case])


@pytest.fixture(scope="session")
def make_plan() -> MakePlan:
    return build_plan


@pytest.fixture(scope="session")
def run_dir() -> str:
    return RUN_DIR


@pytest.fixture(scope="session")
def paths() -> RunPaths:
    return RunPaths(Path(RUN_DIR))


@pytest.fixture(scope="session")
def project_root() -> Path:
    return PROJECT_ROOT


@pytest.fixture(scope="session")
def all_cases() -> frozenset[str]:
    return frozenset(CASES)
