"""Measured communication of two or four ranks per step and operation, compared with the estimate of the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from launcher.core.choices import FSDP_STRATEGIES, Strategy
from launcher.core.run_paths import RunPaths
from launcher.plan.estimate.communication import Collective, make_collectives, make_exchange
from launcher.plan.estimate.step_time import Workload
from launcher.render.deepspeed import PERSISTENT_ELEMENTS
from launcher.request.request import PlannedRun
from tests.conftest import ROOT
from tests.distributed.harness import Harness, TrainingCase

SCRIPT = str(ROOT / "tests/distributed/traffic_counting_train.py")
NUM_MICRO_STEPS = 2
# Two ranks per node, two micro-steps of one sequence; evaluation and checkpoint come after the third step.
CONFIG: Mapping[str, Any] = {"max_steps": 3}
BF16 = {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"}
CASES = [
    TrainingCase(strategy="fsdp2"),
    TrainingCase(strategy="ddp", adapter="full"),
    TrainingCase(strategy="zero2", adapter="full"),
    TrainingCase(strategy="fsdp2", adapter="full"),
    TrainingCase(strategy="zero3", adapter="full"),
    TrainingCase(strategy="ddp"),
    TrainingCase(strategy="ddp", changes={"defer_gradient_sync": True}),
    TrainingCase(strategy="zero1", adapter="full"),
    TrainingCase(strategy="zero2"),
    TrainingCase(strategy="zero3"),
    TrainingCase(strategy="fsdp2", config={"gradient_checkpointing": True}),  # recomputation adds no all-gather
    TrainingCase(strategy="fsdp2", changes=BF16),
    TrainingCase(strategy="zero2", changes=BF16),
    TrainingCase(strategy="zero3", changes=BF16),
    TrainingCase(strategy="hsdp", nodes=2),
    TrainingCase(strategy="hsdp", nodes=2, adapter="full"),
]
# Collectives by the name of torch's operation.
KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
}
SMALL = 1024  # bytes: losses, norms, flags and the initial checks of DDP


def get_case_name(case: TrainingCase) -> str:
    more = "-checkpointed" if case.config else "-bf16" if case.changes == BF16 else "-deferred" if case.changes else ""
    return f"{case.strategy}-{case.adapter}{more}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=get_case_name)
def test_communicated_bytes_match_the_estimate(harness: Harness, case: TrainingCase) -> None:
    check_traffic(harness, case)


def check_traffic(harness: Harness, case: TrainingCase) -> None:
    counted = TrainingCase(
        strategy=case.strategy,
        adapter=case.adapter,
        changes=case.changes,
        nodes=case.nodes,
        config={**CONFIG, **case.config},
        global_batch=case.num_ranks * NUM_MICRO_STEPS,
    )
    planned, paths = harness.write(counted)
    ended = harness.launch_nodes(planned, paths, script=SCRIPT)
    assert ended.returncode == 0, ended.console
    expected = compute_expected_bytes(planned, counted.strategy)
    for rank in range(case.num_ranks):
        sizes = read_sizes(paths, rank, step=2)
        assert sizes.keys() - KINDS.keys() <= {"broadcast_"}, "operations that are not counted"
        for operation, kind in KINDS.items():
            found = sum(size for size in sizes.get(operation, []) if size > SMALL)
            expected_bytes = expected.get(kind, 0.0)
            assert found == pytest.approx(expected_bytes, rel=get_tolerance(counted.strategy, kind)), (
                operation,
                found,
                expected_bytes,
            )
    check_messages(planned, counted.strategy, read_sizes(paths, 0, step=2))


def get_tolerance(strategy: Strategy, kind: str) -> float:
    """Shards are padded. ZeRO-3 does not shard small parameters, and gathers them once per step."""
    return 0.05 if strategy == "zero3" and kind == "all-gather" else 0.005


def compute_expected_bytes(planned: PlannedRun, strategy: Strategy) -> dict[str, float]:
    """Return the estimated bytes per step, by operation."""
    total: dict[str, float] = {}
    for one in get_collectives(planned, strategy):
        times = NUM_MICRO_STEPS if one.moment == "micro-step" else 1
        shards = planned.plan.hardware.gpus_per_node if one.scope == "between nodes" else 1
        total[one.kind] = total.get(one.kind, 0.0) + times * one.num_bytes / shards
    return total


def get_collectives(planned: PlannedRun, strategy: Strategy) -> tuple[Collective, ...]:
    plan = planned.plan
    workload = Workload(
        shape=plan.base,
        adapter=plan.adapter.kind,
        quantization=plan.quantization_kind,
        compute_dtype=plan.precision.compute_dtype,
        compiled=False,
        checkpointing=plan.checkpointing,
        document_tokens=1.0,
    )
    return make_collectives(strategy, make_exchange(workload, plan.adapter.trainable_parameters))


def check_messages(planned: PlannedRun, strategy: Strategy, sizes: Mapping[str, list[int]]) -> None:
    """Check the number of messages of FSDP2, which communicates by layers; the estimate is exact only there."""
    if strategy not in FSDP_STRATEGIES:
        return
    for kind, operation in (("all-gather", "_allgather_base_"), ("reduce-scatter", "_reduce_scatter_base_")):
        of_kind = [one for one in get_collectives(planned, strategy) if one.kind == kind]
        num_messages = sum(one.num_messages * (NUM_MICRO_STEPS if one.moment == "micro-step" else 1) for one in of_kind)
        # With full fine-tuning the root module has gradients, too: one more reduce-scatter per micro-step.
        spare = NUM_MICRO_STEPS if kind == "reduce-scatter" and planned.plan.adapter.kind == "full" else 0
        assert num_messages <= len(sizes[operation]) <= num_messages + spare


def read_sizes(paths: RunPaths, rank: int, step: int) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = json.loads((paths.logs / f"traffic-{rank}-{step}.json").read_text())
    return sizes


def test_zero3_tolerance_covers_unsharded_parameters(harness: Harness) -> None:
    """Unsharded parameters are 0.1 % of a real base model and a few percent here, which the tolerance covers."""
    shape = harness.plan(TrainingCase(strategy="zero3", adapter="full")).plan.base
    layers = [linear.num_parameters for linear in shape.linears]
    small = shape.num_layers * sum(count for count in layers if count < PERSISTENT_ELEMENTS)
    assert 0 < small < 0.05 * shape.num_parameters
