"""How far a plan goes by what runs of this machine have measured: rules by hand, then whole plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base_models.shapes import load_shape
from launcher.core.units import GIB
from launcher.corpus.first_rows import probe_rows
from launcher.hardware.gpu_catalogue import lookup_gpu
from launcher.hardware.model import make_hardware
from launcher.manifest import load_manifest
from launcher.plan import Plan, PlanOptions, make_plan
from launcher.plan.calibration import (
    NO_CALIBRATION,
    Calibration,
    MeasuredRun,
    RunFamily,
    compute_measured_speed,
    compute_memory_correction,
    compute_speed_correction,
    correct_memory,
    make_calibration,
    make_family,
)
from launcher.plan.estimate.memory import estimate_memory
from launcher.plan.estimator_inputs import estimate_plan_memory, recipe_from_plan, workload_from_plan
from launcher.plan.model import CALIBRATION_TERM, CompilePlan
from launcher.request.request import Request, plan_request
from tests.conftest import ROOT, expert_manifests

FAMILY = RunFamily(
    size_class="under 1B",
    adapter="lora",
    quantization="none",
    checkpointing="none",
    compiled=True,
    loss_kernel="chunked",
    attention="varlen",
    strategy="single",
    offload="none",
    num_ranks=1,
)


def plan_for(gpu: str, calibration: Calibration = NO_CALIBRATION, base: str = "") -> Plan:
    loaded = load_manifest(ROOT / "experts/neo4j/manifest.json")
    return make_plan(
        loaded.manifest,
        make_hardware(lookup_gpu(gpu), gpus_per_node=1, nodes=1),
        base=load_shape(base or loaded.manifest.base.name, ()),
        rows=probe_rows(loaded.manifest.training.dataset, loaded.folder),
        options=PlanOptions(calibration=calibration),
    )


def make_seen(number: int, memory: float | None = None, speed: float | None = None, **changes: Any) -> MeasuredRun:
    values = {
        "run": f"run-{number}",
        "when": f"2026-11-15T00:00:{number:02d}+00:00",
        "family": FAMILY,
        "base": "Qwen/Qwen3-0.6B",
        "estimated_bytes": 10 * GIB,
        "measured_bytes": None if memory is None else round(10 * GIB * memory),
        "estimated_tokens_per_second": None if speed is None else 1000.0,
        "measured_tokens_per_second": 1000.0 * (speed or 1.0),
        **changes,
    }
    return MeasuredRun(**values)


def of_memory(*ratios: float, **changes: Any) -> Calibration:
    return make_calibration(make_seen(number, memory=ratio, **changes) for number, ratio in enumerate(ratios))


def memory_factor(calibration: Calibration, estimated_bytes: int = 10 * GIB) -> float:
    found = compute_memory_correction(calibration, FAMILY, estimated_bytes)
    assert found is not None
    return found.factor


# ----------------------------------------------------------------------------------------------------------- the rules


def test_nothing_measured_is_no_correction() -> None:
    assert compute_memory_correction(NO_CALIBRATION, FAMILY, GIB) is None
    assert compute_speed_correction(NO_CALIBRATION, FAMILY) is None
    assert compute_memory_correction(of_memory(1.2), FAMILY.model_copy(update={"adapter": "dora"}), GIB) is None


def test_one_run_above_its_estimate_raises_by_all_of_it() -> None:
    assert memory_factor(of_memory(1.018)) == pytest.approx(1.018)
    assert memory_factor(of_memory(0.95, 1.018, 0.97)) == pytest.approx(1.018), "the highest counts, whatever the rest"
    assert memory_factor(of_memory(1.018), estimated_bytes=100 * GIB) == pytest.approx(1.018), "for larger runs, too"


def test_lowering_takes_three_runs_and_leaves_room_for_their_spread() -> None:
    assert memory_factor(of_memory(0.95, 0.95)) == 1.0
    assert memory_factor(of_memory(0.95, 0.95, 0.95)) == pytest.approx(0.95)
    assert memory_factor(of_memory(0.93, 0.94, 0.95)) == pytest.approx(0.97)
    assert memory_factor(of_memory(0.80, 0.90, 0.99)) == 1.0, "they differ by more than they are below"


def test_lowering_ends_at_the_largest_run_that_was_seen() -> None:
    seen = of_memory(0.95, 0.95, 0.95)
    assert memory_factor(seen, estimated_bytes=10 * GIB) < 1.0
    assert memory_factor(seen, estimated_bytes=10 * GIB + 1) == 1.0


def test_where_memory_ran_out_before_nothing_is_lowered() -> None:
    seen = replace(of_memory(0.95, 0.95, 0.95), may_lower=False)
    assert memory_factor(seen) == 1.0
    assert memory_factor(replace(of_memory(1.1), may_lower=False)) == pytest.approx(1.1)


def test_only_the_last_runs_count() -> None:
    assert memory_factor(of_memory(1.3, *[1.0] * 9)) == pytest.approx(1.3)
    assert memory_factor(of_memory(1.3, *[1.0] * 10)) == 1.0
    speeds = make_calibration(make_seen(number, speed=ratio) for number, ratio in enumerate([9.0] * 9 + [0.8] * 10))
    found = compute_speed_correction(speeds, FAMILY)
    assert found is not None
    assert found.num_runs == 10
    assert found.factor == pytest.approx(0.8)


def test_speed_is_the_median() -> None:
    speeds = make_calibration(make_seen(number, speed=ratio) for number, ratio in enumerate((0.9, 5.0, 1.1)))
    found = compute_speed_correction(speeds, FAMILY)
    assert found is not None
    assert found.factor == pytest.approx(1.1)


def test_runs_by_cuda_graphs_say_nothing_of_those_without() -> None:
    speeds = make_calibration([make_seen(1, speed=0.5), make_seen(2, speed=2.0, captured=True)])
    found = [compute_speed_correction(speeds, FAMILY, captures=captures) for captures in (False, True)]
    assert [one and one.factor for one in found] == [0.5, 2.0]


def test_measured_speed_is_used_without_an_estimate() -> None:
    seen = make_calibration([make_seen(1), make_seen(2, base="another", measured_tokens_per_second=9.0)])
    found = compute_measured_speed(seen, FAMILY, "Qwen/Qwen3-0.6B")
    assert found is not None
    assert (found.factor, found.num_runs) == (1000.0, 1)
    assert compute_measured_speed(seen, FAMILY, "a third") is None


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=15), st.floats(0.1, 30.0))
def test_memory_is_never_planned_below_the_highest_of_the_last_runs(ratios: list[float], gib: float) -> None:
    factor = memory_factor(of_memory(*ratios), estimated_bytes=int(gib * GIB))
    assert factor >= min(1.0, max(ratios[-10:])) - 1e-9
    assert factor <= max(1.0, *ratios) + 1e-9


# ---------------------------------------------------------------------------------------------------------- the recipe


@pytest.mark.parametrize("gpu", ["rtx4090", "h200", None])
@pytest.mark.parametrize("manifest", expert_manifests(), ids=lambda file: file.parent.name)
def test_the_recipe_of_a_plan_is_what_its_memory_was_estimated_from(manifest: Any, gpu: str | None) -> None:
    profile: Any = "full" if gpu else "smoke"
    plan = plan_request(Request(expert=str(manifest), gpu=gpu, profile=profile)).plan
    assert estimate_plan_memory(plan).terms == plan.memory.terms


def test_the_recipe_of_a_sharded_plan() -> None:
    request = Request(expert=str(ROOT / "experts/neo4j/manifest.json"), gpu="rtx4090", gpus_per_node=4, nodes=2)
    plan = plan_request(replace(request, strategy="fsdp2")).plan
    assert plan.strategy == "fsdp2"
    assert estimate_plan_memory(plan).terms == plan.memory.terms


def test_the_workload_of_a_plan_is_what_it_computes() -> None:
    plan = plan_for(gpu="h200")
    eager = workload_from_plan(plan.model_copy(update={"compile": None}), 350.0)
    assert (eager.shape, eager.adapter, eager.compute_dtype) == (plan.base, "lora", "bf16")
    assert (eager.compiled, eager.fused, eager.document_tokens) == (False, True, 350.0)
    layer = CompilePlan(scope="layer", backend="inductor", mode=None)
    compiled = workload_from_plan(plan.model_copy(update={"compile": layer}), 350.0)
    assert (compiled.compiled, compiled.fused) == (True, True)


# --------------------------------------------------------------------------------------------------------- whole plans


def seen_of(plan: Plan, number: int, memory: float | None = None, speed: float | None = None) -> MeasuredRun:
    """As if a run of this plan had been made."""
    estimated = plan.speed.estimated_tokens_per_second
    assert estimated is not None
    allocated = estimate_plan_memory(plan).allocated_bytes
    return make_seen(
        number,
        family=make_family(plan.base, recipe_from_plan(plan)),
        base=plan.base.name,
        estimated_bytes=allocated,
        measured_bytes=None if memory is None else round(allocated * memory),
        estimated_tokens_per_second=estimated,
        measured_tokens_per_second=estimated * (speed or 1.0),
        captured=plan.cuda_graph,
    )


def decision(plan: Plan, name: str) -> str:
    return next((f"{one.value}: {one.reason}" for one in plan.decisions if one.name == name), "")


def test_a_plan_is_raised_and_says_so() -> None:
    plain = plan_for(gpu="h200")
    known = make_calibration([seen_of(plain, 1, memory=1.018), *(seen_of(plain, n, memory=1.0) for n in (2, 3, 4))])
    plan = plan_for(gpu="h200", calibration=known)
    assert plan.memory.terms[:-1] == plain.memory.terms
    assert plan.memory.allocated_bytes == pytest.approx(1.018 * plain.memory.allocated_bytes, rel=1e-6)
    assert decision(plan, "memory estimate").startswith("+1.8 % by 4 runs on this machine: similar runs used 100.0")
    term = plan.memory.terms[-1]
    assert (term.name, term.note) == (CALIBRATION_TERM, "+1.8 % by 4 runs on this machine")
    assert decision(plain, "memory estimate") == ""


def test_a_raise_can_cost_a_micro_batch() -> None:
    """On a card that was nearly full."""
    plain = plan_for(gpu="rtx4090")
    known = make_calibration([seen_of(plain, 1, memory=1.6)])
    plan = plan_for(gpu="rtx4090", calibration=known)
    assert plan.memory.total_bytes <= plan.memory.usable_bytes
    assert estimate_plan_memory(plan).allocated_bytes < plain.memory.allocated_bytes
    assert plan.batch.global_batch_size == plain.batch.global_batch_size


def test_speed_is_scaled_with_all_that_follows_from_it() -> None:
    plain = plan_for(gpu="h200")
    plan = plan_for(gpu="h200", calibration=make_calibration(seen_of(plain, n, speed=0.5) for n in range(3)))
    assert plain.speed.tokens_per_second is not None
    assert plan.speed.estimated_tokens_per_second == plain.speed.tokens_per_second
    assert plan.speed.tokens_per_second == pytest.approx(plain.speed.tokens_per_second / 2)
    assert plan.speed.mfu == pytest.approx((plain.speed.mfu or 0) / 2)
    assert decision(plan, "speed estimate").startswith("-50.0 % by 3 runs on this machine: median")
    assert plan.speed.error == 0.1
    assert plan.speed.confidence.startswith("within about 10 %: similar runs were measured on this machine")
    assert (plan.batch, plan.strategy) == (plain.batch, plain.strategy), "the search does not know of it"


@pytest.mark.parametrize(
    ("ratio", "confidence", "error"),
    [
        (0.25, "very uncertain (0.2 to 4.0 times this speed): one similar run reached 25 % of the estimate", 3.0),
        (0.95, "within about 20 %: similar runs were measured on this GPU", 0.2),
    ],
)
def test_one_run_far_from_the_estimate_makes_the_speed_uncertain(ratio: float, confidence: str, error: float) -> None:
    known = make_calibration([seen_of(plan_for(gpu="h200"), 1, speed=ratio)])
    speed = plan_for(gpu="h200", calibration=known).speed
    assert speed.confidence.startswith(confidence)
    assert speed.error == error


def test_other_families_are_left_alone() -> None:
    plain = plan_for(gpu="h200")
    seen = seen_of(plain, 1, memory=1.5, speed=0.5)
    other = seen.model_copy(update={"family": seen.family.model_copy(update={"adapter": "dora"})})
    assert plan_for(gpu="h200", calibration=make_calibration([other])) == plain


def test_plans_are_the_same_for_the_same_runs() -> None:
    plain = plan_for(gpu="h200")
    seen = [seen_of(plain, number, memory=0.9 + number / 100, speed=1 + number / 10) for number in range(14)]
    plans = [plan_for(gpu="h200", calibration=make_calibration(order)) for order in (seen, reversed(seen))]
    assert plans[0].model_dump_json() == plans[1].model_dump_json()


def test_corrected_sizes_still_grow_with_the_micro_batch() -> None:
    plain = plan_for(gpu="h200")
    known = make_calibration(seen_of(plain, number, memory=0.9) for number in range(3))
    recipe, last = recipe_from_plan(plain), 0
    for size in range(1, 2 * recipe.micro_batch_size):
        sized = replace(recipe, micro_batch_size=size)
        total = correct_memory(plain.base, sized, estimate_memory(plain.base, sized), known).total_bytes
        assert total > last
        last = total


def test_size_classes_tell_the_catalogue_apart() -> None:
    small, large = (plan_for(gpu="h200", base=f"Qwen/Qwen3-{size}") for size in ("0.6B", "8B"))
    names = [make_family(plan.base, recipe_from_plan(plan)).size_class for plan in (small, large)]
    assert names == ["under 1B", "6B to 12B"]


@pytest.mark.parametrize("field", ["fp8_base", "fp8_layers"])
def test_runs_in_fp8_do_not_correct_those_in_bf16(field: str) -> None:
    plan = plan_for(gpu="h200")
    in_fp8 = plan.model_copy(update={"precision": plan.precision.model_copy(update={field: True})})
    known, estimated = make_calibration([seen_of(in_fp8, 1, memory=1.5)]), estimate_plan_memory(plan).allocated_bytes
    families = [make_family(one.base, recipe_from_plan(one)) for one in (in_fp8, plan)]
    assert [family.size_class for family in families] == ["under 1B, FP8", "under 1B"]
    found = [compute_memory_correction(known, family, estimated) is not None for family in families]
    assert found == [True, False]
