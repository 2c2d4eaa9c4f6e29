"""The same training on 1, 2, 4, … GPUs: what a plan tells of it."""

from __future__ import annotations

import pytest

from launcher.cli.print_plan import print_plan
from launcher.plan import Plan
from launcher.plan.model import ScalingPlan
from tests.unit.plan.conftest import FULL_FINE_TUNING, plan_for


def scaling_of(plan: Plan) -> ScalingPlan:
    assert plan.speed.scaling is not None
    return plan.speed.scaling


def test_one_gpu_has_nothing_to_compare() -> None:
    assert plan_for(gpu="h100").speed.scaling is None


@pytest.mark.parametrize(
    ("gpus", "nodes", "counts"),
    [(2, 1, [1, 2]), (8, 1, [1, 2, 4, 8]), (6, 1, [1, 2, 4, 6]), (8, 3, [1, 2, 4, 8, 16, 24])],
)
def test_powers_of_two_up_to_what_was_asked_for(gpus: int, nodes: int, counts: list[int]) -> None:
    scaling = scaling_of(plan_for(gpu="h100", gpus=gpus, nodes=nodes))
    assert [point.num_ranks for point in scaling.points] == counts


def test_the_last_row_is_the_plan() -> None:
    plan = plan_for(gpu="rtx4090", gpus=4, nodes=2)
    last = scaling_of(plan).points[-1]
    assert last.tokens_per_second == pytest.approx(plan.speed.tokens_per_second)
    assert last.seconds_per_step == pytest.approx(plan.speed.seconds_per_step)
    assert (last.strategy, last.micro_batch_size) == (plan.strategy, plan.batch.micro_batch_size)
    assert last.exposed_seconds + last.hidden_seconds == pytest.approx(last.communication_seconds)
    assert last.link == "the network between nodes"


def test_scaling_rows_equal_plans_for_as_many_gpus() -> None:
    for point in scaling_of(plan_for(gpu="rtx4090", gpus=4, base="Qwen/Qwen3-8B")).points:
        alone = plan_for(gpu="rtx4090", gpus=point.num_ranks, base="Qwen/Qwen3-8B")
        assert point.tokens_per_second == pytest.approx(alone.speed.tokens_per_second)
        assert point.strategy == alone.strategy


def test_adapter_training_scales_nearly_linearly() -> None:
    scaling = scaling_of(plan_for(gpu="h100", gpus=8, config={"batch_size": 128, "gradient_accumulation_steps": 1}))
    assert scaling.reference_ranks == 1
    assert 0.9 < scaling.points[-1].efficiency < 1.0
    assert "communication-bound" not in scaling.summary


def test_kernel_launches_limit_small_micro_steps_without_a_cuda_graph() -> None:
    """Six sequences per GPU: replicas replay a CUDA graph and reduce gradients after it, or launch their kernels."""
    plan = plan_for(gpu="h100", gpus=8)
    assert (plan.strategy, plan.cuda_graph, plan.defer_gradient_sync) == ("ddp", True, True)
    last = scaling_of(plan).points[-1]
    assert last.efficiency > 0.9
    assert 0 < last.exposed_seconds < 2e-3, "of 40 MB over NVLink, and nothing hides it"
    launched = plan_for(gpu="h100", gpus=8, config={"torch_compile_mode": "default"})
    assert (launched.strategy, launched.cuda_graph, launched.defer_gradient_sync) == ("ddp", False, False)
    scaling = scaling_of(launched)
    assert scaling.points[-1].efficiency < 0.9 * last.efficiency
    assert scaling.points[-1].exposed_seconds < 1e-3


def test_slow_network_is_reported_with_suggestions() -> None:
    plan = plan_for(gpu="rtx4090", gpus=4, nodes=2, base="Qwen/Qwen3-4B", overrides=FULL_FINE_TUNING)
    scaling = scaling_of(plan)
    last = scaling.points[-1]
    assert last.exposed_seconds > 0.5 * last.seconds_per_step
    share = round(100 * last.exposed_seconds / last.seconds_per_step)
    assert f"communication-bound: {share} % of a step waits for the network" in scaling.summary
    assert "adapter_type lora" in scaling.summary
    assert "the network of a node carries 3 GB/s in each direction" in scaling.assumptions
    assert scaling.assumptions[0] == "estimated, not measured: we never measured several GPUs"


def test_scaling_reference_does_not_offload() -> None:
    scaling = scaling_of(plan_for(gpu="h100", gpus=8, base="Qwen/Qwen3-8B", overrides=FULL_FINE_TUNING))
    assert scaling.points[0].offload != "none"
    assert scaling.reference_ranks > 1
    assert max(point.efficiency for point in scaling.points) < 1.5


def test_requested_strategy_does_not_apply_to_the_single_gpu_row() -> None:
    first, *others = scaling_of(plan_for(gpu="h100", gpus=4, strategy="fsdp2")).points
    assert first.strategy == "single"
    assert {point.strategy for point in others} == {"fsdp2"}


def test_idle_gpus_are_reported() -> None:
    scaling = scaling_of(plan_for(gpu="h100", gpus=8, nodes=16))
    assert scaling.points[-1].efficiency < 0.7
    assert "too little work per GPU (1 sequence per step)" in scaling.summary


def test_plan_prints_one_line_about_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan_for(gpu="rtx4090", gpus=4))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Scaling: "))
    assert "% scaling efficiency relative to 1 GPU" in line
    assert "estimated, not measured" in line
    print_plan(plan_for(gpu="rtx4090"))
    assert "Scaling" not in capsys.readouterr().out


def test_scaling_rows_compile_like_plans_for_them() -> None:
    """One card offloads under ZeRO-3, which is not compiled; eight shard without it, and are."""
    asked = plan_for(gpu="rtx4080super", gpus=8, base="Qwen/Qwen3-8B")
    alone = plan_for(gpu="rtx4080super", base="Qwen/Qwen3-8B")
    assert (alone.strategy, alone.compile, asked.compile is not None) == ("zero3", None, True)
    assert asked.speed.scaling is not None
    assert alone.speed.tokens_per_second == pytest.approx(asked.speed.scaling.points[0].tokens_per_second)
