"""Plans for the tests of the planner: real manifests, catalogue hardware, the real search."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from launcher.plan import Plan
from launcher.request.request import Request, plan_request

MakePlan = Callable[..., Plan]

FULL_FINE_TUNING = (
    "training.config.adapter_type=full",
    "training.config.rank=null",
    "training.config.alpha=null",
    "training.config.dropout=null",
    "training.config.target_modules=[]",
)


def plan_for(expert: str = "neo4j", gpu: str | None = "rtx4090", gpus: int | None = None, **more: Any) -> Plan:
    """`config={"packing": False}` overrides keys of training.config."""
    config = more.pop("config", {})
    overrides = [
        *more.pop("overrides", ()),
        *(f"training.config.{key}={json.dumps(value)}" for key, value in config.items()),
    ]
    request = Request(expert=expert, gpu=gpu, gpus_per_node=gpus, overrides=tuple(overrides), **more)
    return plan_request(request).plan


def decision(plan: Plan, name: str) -> str:
    """Value and reason of one decision, as a line."""
    (found,) = (d for d in plan.decisions if d.name == name)
    return f"{found.value} | {found.reason}"


@pytest.fixture(scope="session")
def make_plan() -> MakePlan:
    return plan_for
