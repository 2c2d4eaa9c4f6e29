"""Full fine-tuning in little memory: what the plan chooses, why, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.core.errors import DoesNotFitError, InputError
from launcher.core.units import GIB
from launcher.plan import Plan
from launcher.plan.model import OptimizerPlan, PrecisionPlan
from launcher.plan.resume_identity import collect_learning_settings
from tests.unit.plan.conftest import FULL_FINE_TUNING, decision, plan_for

LARGE, SMALL = "Qwen/Qwen3-8B", "Qwen/Qwen3-1.7B"
UNCLIPPED = {"optim": None, "max_grad_norm": 0, "batch_size": 2, "gradient_accumulation_steps": 1}


def plan_full(base: str, gpu: str = "h200", gib: float | None = None, **more: Any) -> Plan:
    config = {"optim": None, **more.pop("config", {})}
    limit = None if gib is None else int(1024 * gib)
    return plan_for(gpu=gpu, base=base, vram_limit_mib=limit, overrides=FULL_FINE_TUNING, config=config, **more)


def test_fp32_weights_are_kept_where_they_fit() -> None:
    plan = plan_full(SMALL)
    assert plan.precision.trainable_dtype == "fp32"
    assert plan.optimizer.name == "adamw_torch_fused"
    assert not plan.optimizer.in_backward


def test_8b_fits_24_gib_with_paged_moments_and_updates_in_backward() -> None:
    plan = plan_full(LARGE, gib=24, config=UNCLIPPED)
    assert plan.memory.total_bytes < 24 * GIB
    assert (plan.strategy, plan.offload, plan.batch.gradient_accumulation_steps) == ("single", "none", 1)
    assert plan.precision == PrecisionPlan(
        compute_dtype="bf16", base_dtype="bf16", trainable_dtype="bf16", use_tf32=True, loss_scaling=False
    )
    assert plan.optimizer.name == "paged_adamw_8bit"
    assert plan.optimizer.in_backward
    assert not plan.cuda_graph
    assert plan.memory.host_bytes > 14 * GIB, "the moments"
    assert "FP32 weights need" in decision(plan, "trainable weights")
    assert "in CPU memory" in decision(plan, "optimizer")
    assert "gradients of all weights do not fit" in decision(plan, "optimizer in backward")
    assert plan.optimizer.max_grad_norm is None
    assert all(fallback.micro_batch_size == 2 for fallback in plan.oom_fallbacks)


def test_1_7b_fits_16_gib_without_offload_and_keeps_clipping() -> None:
    plan = plan_full(SMALL, gib=16)
    assert plan.memory.total_bytes < 16 * GIB
    assert (plan.strategy, plan.offload) == ("single", "none")
    assert (plan.precision.trainable_dtype, plan.optimizer.name) == ("bf16", "adamw_bnb_8bit")
    assert not plan.optimizer.in_backward
    assert plan.optimizer.max_grad_norm == 1.0
    assert plan.memory.host_bytes == 0
    assert any("added up in BF16" in note for note in plan.notes)


def test_1_7b_on_a_4090_is_not_offloaded() -> None:
    plan = plan_full(SMALL, gpu="rtx4090")
    assert (plan.strategy, plan.offload, plan.precision.trainable_dtype) == ("single", "none", "bf16")


def test_an_optimizer_of_the_manifest_is_kept() -> None:
    plan = plan_full(SMALL, gib=28, config={"optim": "adamw_torch_fused"})
    assert (plan.precision.trainable_dtype, plan.optimizer.name) == ("bf16", "adamw_torch_fused")


@pytest.mark.parametrize("fixed", [{"bf16_stochastic_round": False}, {"optim": "adamw_torch_fused"}])
def test_a_plan_that_must_offload_names_the_way_out(fixed: dict[str, Any]) -> None:
    plan = plan_full(SMALL, gpu="rtx4090", config=fixed)
    assert (plan.precision.trainable_dtype, plan.offload) == ("fp32", "optimizer")
    assert any("bf16_stochastic_round true, optim adamw_bnb_8bit it would fit" in note for note in plan.notes)


def test_a_clipping_norm_of_the_manifest_is_not_ignored() -> None:
    """The published manifests set max_grad_norm 1: the error names the settings that fit, clipping included."""
    with pytest.raises(DoesNotFitError) as caught:
        plan_full(LARGE, gib=24)
    hint = str(caught.value)
    assert "bf16_stochastic_round true, optim paged_adamw_8bit, optimizer_in_bwd true, max_grad_norm 0" in hint
    assert "and a global batch of 3 fits" in hint


def test_8_bit_moments_are_named_as_what_excludes_sharding() -> None:
    with pytest.raises(DoesNotFitError, match=r"optim adamw_torch_fused fits \(8-bit optimizers exclude"):
        plan_full(LARGE, gpu="h100", gpus=8, config={"optim": "adamw_bnb_8bit"})


def test_requests_of_the_manifest_are_followed() -> None:
    config = {**UNCLIPPED, "bf16_stochastic_round": True, "optimizer_in_bwd": True}
    plan = plan_full(SMALL, config=config)
    assert (plan.precision.trainable_dtype, plan.optimizer.in_backward) == ("bf16", True)
    assert "bf16_stochastic_round in the manifest" in decision(plan, "trainable weights").replace(
        "--set training.config.bf16_stochastic_round", "bf16_stochastic_round in the manifest"
    )
    assert plan.batch.gradient_accumulation_steps == 1


def test_paged_moments_of_an_adapter_stay_on_the_gpu() -> None:
    plan = plan_for(config={"optim": "paged_adamw_8bit"})
    assert plan.optimizer.name == "adamw_bnb_8bit"
    assert "moments of an adapter are small" in decision(plan, "optimizer")


@pytest.mark.parametrize(
    ("hardware", "config", "message"),
    [
        ({"gpus": 2}, {"bf16_stochastic_round": True}, "runs in one process, not on 2 ranks"),
        ({"gpus": 2}, {"optimizer_in_bwd": True, "max_grad_norm": 0}, "runs in one process, not on 2 ranks"),
        ({}, {"bf16_stochastic_round": True, "strategy": "zero2"}, "runs in one process, without zero2"),
        ({}, {"bf16_stochastic_round": True, "offload": "optimizer"}, "runs in one process, without offload optimizer"),
        ({}, {"bf16_stochastic_round": True, "bf16": False}, "this plan computes in FP32"),
        ({}, {"bf16_stochastic_round": True, "optim": "sgd"}, "needs AdamW; sgd is not supported"),
        ({}, {"optimizer_in_bwd": True, "max_grad_norm": 1.0}, "set max_grad_norm to 0"),
        ({}, {"optimizer_in_bwd": True, "max_grad_norm": None}, "set max_grad_norm to 0"),
    ],
)
def test_impossible_requests_are_refused(hardware: dict[str, Any], config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_full(SMALL, config=config, **hardware)


@pytest.mark.parametrize("key", ["bf16_stochastic_round", "optimizer_in_bwd"])
def test_adapters_do_not_need_them(key: str) -> None:
    with pytest.raises(InputError, match=f"{key}: applicable to adapter_type full only, not to lora"):
        plan_for(config={key: True})


def test_sharded_strategies_refuse_paged_moments() -> None:
    with pytest.raises(InputError, match="fsdp2 does not support paged_adamw_8bit"):
        plan_full(SMALL, gpus=2, config={"optim": "paged_adamw_8bit", "strategy": "fsdp2"})


def test_a_run_can_be_resumed_with_moments_in_the_other_memory() -> None:
    """Where moments are kept, and when weights are updated, changes no bit; the dtype of weights does."""
    plan = plan_full(SMALL, config={**UNCLIPPED, "bf16_stochastic_round": True, "optim": "adamw_bnb_8bit"})

    def vary(precision: PrecisionPlan = plan.precision, **optimizer: Any) -> dict[str, object]:
        changed: OptimizerPlan = plan.optimizer.model_copy(update=optimizer)
        return collect_learning_settings(plan.model_copy(update={"optimizer": changed, "precision": precision}))

    assert vary(name="paged_adamw_8bit", in_backward=True) == vary()
    assert vary(plan.precision.model_copy(update={"trainable_dtype": "fp32"})) != vary()


def test_faster_plan_with_other_weights_is_not_promised_to_have_the_same_result() -> None:
    overrides = (*FULL_FINE_TUNING, "training.config.optim=null")
    plan = plan_for("json", base="Qwen/Qwen3-1.7B", ram_gib_per_node=256, strategy="zero3", overrides=overrides)
    (note,) = (note for note in plan.notes if note.startswith("--strategy slows training down"))
    assert "same result" not in note
