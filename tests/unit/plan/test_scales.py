"""The same training on 1, 2, 4, … GPUs: what a plan tells of it."""

from __future__ import annotations

import pytest

from launcher.cli.show_plan import print_plan
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


def test_each_row_is_what_a_plan_for_it_says() -> None:
    for point in scaling_of(plan_for(gpu="rtx4090", gpus=4, base="Qwen/Qwen3-8B")).points:
        alone = plan_for(gpu="rtx4090", gpus=point.num_ranks, base="Qwen/Qwen3-8B")
        assert point.tokens_per_second == pytest.approx(alone.speed.tokens_per_second)
        assert point.strategy == alone.strategy


def test_an_adapter_scales_nearly_by_itself() -> None:
    scaling = scaling_of(plan_for(gpu="h100", gpus=8, config={"batch_size": 128, "gradient_accumulation_steps": 1}))
    assert scaling.reference_ranks == 1
    assert 0.9 < scaling.points[-1].efficiency < 1.0
    assert "communication-bound" not in scaling.verdict


def test_launching_limits_ranks_that_have_little_to_do() -> None:
    """Six sequences each: replicas replay a graph, as one GPU does, and exchange behind it; or launch their kernels."""
    plan = plan_for(gpu="h100", gpus=8)
    assert (plan.strategy, plan.cuda_graph, plan.adds_up_behind) == ("ddp", True, True)
    last = scaling_of(plan).points[-1]
    assert last.efficiency > 0.9
    assert 0 < last.exposed_seconds < 2e-3, "of 40 MB over NVLink, and nothing hides it"
    launched = plan_for(gpu="h100", gpus=8, config={"torch_compile_mode": "default"})
    assert (launched.strategy, launched.cuda_graph, launched.adds_up_behind) == ("ddp", False, False)
    scaling = scaling_of(launched)
    assert scaling.points[-1].efficiency < 0.9 * last.efficiency
    assert scaling.points[-1].exposed_seconds < 1e-3


def test_a_slow_network_is_told_with_what_would_help() -> None:
    plan = plan_for(gpu="rtx4090", gpus=4, nodes=2, base="Qwen/Qwen3-4B", overrides=FULL_FINE_TUNING)
    scaling = scaling_of(plan)
    last = scaling.points[-1]
    assert last.exposed_seconds > 0.5 * last.seconds_per_step
    share = round(100 * last.exposed_seconds / last.seconds_per_step)
    assert scaling.verdict.startswith(f"communication-bound: {share} % of a step is waiting for the network")
    assert "adapter_type lora" in scaling.verdict
    assert "each node's network carries 3 GB/s in one direction" in scaling.assumptions
    assert scaling.assumptions[0] == "no run on more than one GPU was measured by us"


def test_offloading_is_no_measure_for_the_others() -> None:
    scaling = scaling_of(plan_for(gpu="h100", gpus=8, base="Qwen/Qwen3-8B", overrides=FULL_FINE_TUNING))
    assert scaling.points[0].offload != "none"
    assert scaling.reference_ranks > 1
    assert max(point.efficiency for point in scaling.points) < 1.5


def test_a_strategy_that_was_asked_for_is_not_asked_of_one_gpu() -> None:
    first, *others = scaling_of(plan_for(gpu="h100", gpus=4, strategy="fsdp2")).points
    assert first.strategy == "single"
    assert {point.strategy for point in others} == {"fsdp2"}


def test_gpus_without_work_are_told() -> None:
    scaling = scaling_of(plan_for(gpu="h100", gpus=8, nodes=16))
    assert scaling.points[-1].efficiency < 0.7
    assert scaling.verdict.startswith("short of work: each GPU does ")


def test_the_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan_for(gpu="rtx4090", gpus=4))
    text = capsys.readouterr().out
    assert "On paper, 48 sequences a step on fewer GPUs and on these:" in text
    rows = [line.split()[0] for line in text.splitlines() if line[:2] in ("1 ", "2 ", "4 ")]
    assert rows == ["1", "2", "4"]
    assert "each GPU does 9" in text
    assert "assumed: no run on more than one GPU was measured by us" in text
    print_plan(plan_for(gpu="rtx4090"))
    assert "On paper" not in capsys.readouterr().out


def test_rows_compile_as_plans_for_them_would() -> None:
    """One card offloads under ZeRO-3, which is not compiled; eight shard without it, and are."""
    asked = plan_for(gpu="rtx4080super", gpus=8, base="Qwen/Qwen3-8B")
    alone = plan_for(gpu="rtx4080super", base="Qwen/Qwen3-8B")
    assert (alone.strategy, alone.compile, asked.compile is not None) == ("zero3", None, True)
    assert asked.speed.scaling is not None
    assert alone.speed.tokens_per_second == pytest.approx(asked.speed.scaling.points[0].tokens_per_second)
