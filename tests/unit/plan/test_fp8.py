"""FP8 for frozen bases and for full fine-tuning: what the plan predicts, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.core.choices import Strategy
from launcher.core.errors import InputError
from launcher.plan.estimate.memory import estimate_memory
from launcher.plan.estimate.memory.recipe import explain_layer_path
from launcher.plan.estimator_inputs import recipe_from_plan
from tests.conftest import WriteManifest
from tests.unit.plan.conftest import decision, plan_for

FP8 = {"precision": "fp8"}
FULL = {**FP8, "adapter_type": "full"}


def test_weights_need_half_the_memory() -> None:
    base = "Qwen/Qwen3-8B"
    fp8, bf16 = (plan_for(gpu="h200", base=base, config=config) for config in (FP8, {}))
    assert fp8.precision.fp8_base
    assert fp8.precision.compute_dtype == "bf16"
    sizes = [{term.name: term.num_bytes for term in plan.memory.terms} for plan in (fp8, bf16)]
    linears = bf16.base.num_layers * sum(one.in_features * one.out_features for one in bf16.base.linears)
    assert sizes[1]["weights"] - sizes[0]["weights"] == pytest.approx(linears, rel=0.01)
    assert fp8.speed.tokens_per_second is not None
    assert bf16.speed.tokens_per_second is not None
    assert fp8.speed.tokens_per_second > 1.2 * bf16.speed.tokens_per_second
    assert "FP8" in decision(fp8, "precision")
    assert any("experimental" in note for note in fp8.notes)


def test_smoke_profile_says_that_it_is_not_used() -> None:
    note = "precision fp8 is not used: the smoke profile trains a tiny base; --profile full uses it, on a GPU"
    for gpu, value in ((None, "FP32 | no GPU"), ("h100", "BF16 | H100")):
        plan = plan_for(gpu=gpu, profile="smoke", config=FP8)
        assert decision(plan, "precision").startswith(value)
        assert note in plan.notes
        assert not any("fp8" in text for text in plan_for(gpu=gpu, profile="smoke").notes)


@pytest.mark.parametrize(("size", "rows", "measured"), [("0.6B", 16, 33.40), ("0.6B", 2, 5.24), ("8B", 4, 39.11)])
def test_memory_of_runs_on_an_h200(size: str, rows: int, measured: float) -> None:
    """Peak of allocated GiB, by `python benchmarks/training.py measure --cases fp8` on 2026-11-17."""
    config = {
        **FP8,
        "adapter_type": "lora",
        "rank": 16,
        "alpha": 32,
        "dropout": 0.0,
        "target_modules": "all-linear",
        "batch_size": rows,
        "gradient_accumulation_steps": 1,
        "max_seq_length": 2048,
        "loss_on": "all",
        "packing": True,
        "torch_compile": True,
        "optim": "adamw_torch_fused",
    }
    plan = plan_for(gpu="h200", base=f"Qwen/Qwen3-{size}", config=config)
    assert plan.batch.micro_batch_size == rows
    assert plan.memory.allocated_bytes / 2**30 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("size", "rows", "gib", "tokens_per_second"), [("0.6B", 16, 44.15, 137_672), ("1.7B", 8, 53.71, 58_520)]
)
def test_full_fine_tuning_on_an_h200(size: str, rows: int, gib: float, tokens_per_second: float) -> None:
    """By `python benchmarks/training.py measure --cases fp8` on 2026-11-19, with smaller chunks of the loss."""
    config = {
        **FULL,
        "batch_size": rows,
        "gradient_accumulation_steps": 1,
        "max_seq_length": 2048,
        "loss_on": "all",
        "torch_compile": True,
        "optim": "adamw_torch_fused",
    }
    plan = plan_for(gpu="h200", base=f"Qwen/Qwen3-{size}", config=config)
    assert plan.batch.micro_batch_size == rows
    assert plan.memory.allocated_bytes / 2**30 == pytest.approx(gib, rel=0.03)
    assert plan.speed.tokens_per_second == pytest.approx(tokens_per_second, rel=0.05)


def test_full_fine_tuning_multiplies_layers_in_fp8() -> None:
    fp8, bf16 = (plan_for(gpu="h200", config=config) for config in (FULL, {"adapter_type": "full"}))
    assert (fp8.precision.fp8_layers, fp8.precision.fp8_base) == (True, False)
    assert (fp8.precision.trainable_dtype, fp8.precision.compute_dtype) == ("fp32", "bf16")
    assert decision(fp8, "precision").startswith("FP8 layers, BF16")
    assert decision(fp8, "layers").startswith("blocks")
    assert fp8.speed.tokens_per_second is not None
    assert bf16.speed.tokens_per_second is not None
    assert fp8.speed.tokens_per_second > 1.1 * bf16.speed.tokens_per_second
    weights = [next(term.num_bytes for term in plan.memory.terms if term.name == "weights") for plan in (fp8, bf16)]
    assert weights[0] == weights[1]
    assert not plan_for(gpu="h200", profile="smoke", config=FULL).precision.uses_fp8


@pytest.mark.parametrize(("model_type", "path"), [("phi3", "MLP"), ("qwen2", "blocks"), ("olmo2", "matmuls")])
def test_path_of_the_layers(model_type: str, path: str) -> None:
    plan = plan_for(gpu="h200", config=FULL)
    shape = plan.base.model_copy(update={"model_type": model_type})
    assert explain_layer_path(shape, recipe_from_plan(plan))[0] == path


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_full_fine_tuning_runs_on_several_gpus(strategy: Strategy) -> None:
    plan = plan_for(gpu="h200", gpus=4, strategy=strategy, config=FULL)
    assert plan.precision.fp8_layers
    assert plan.strategy == strategy
    assert plan_for(gpu="h200", gpus=4, config=FULL).strategy in ("ddp", "fsdp2")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_deepspeed_is_refused(strategy: Strategy) -> None:
    with pytest.raises(InputError) as error:
        plan_for(gpu="h200", gpus=4, strategy=strategy, config=FULL)
    assert f"{strategy} with precision fp8 has not been verified" in str(error.value.problems)


@pytest.mark.parametrize("offload", ["optimizer", "optimizer_and_parameters"])
def test_offloading_is_refused(offload: str) -> None:
    with pytest.raises(InputError) as error:
        plan_for(gpu="h200", config={**FULL, "offload": offload})
    assert "has not been verified with precision fp8; use offload: none" in str(error.value.problems)


def test_the_smoke_profile_shards_and_offloads_as_without_fp8() -> None:
    for config in ({"strategy": "zero2"}, {"offload": "optimizer"}):
        plans = [
            plan_for(gpu="h200", gpus=2, profile="smoke", config={**config, **more})
            for more in (FULL, {"adapter_type": "full"})
        ]
        assert plans[0].strategy == plans[1].strategy
        assert plans[0].offload == plans[1].offload


def test_fused_ops_save_their_inputs_in_fp8() -> None:
    plan = plan_for(gpu="h200", config={**FP8, "dropout": 0.0})
    recipe = recipe_from_plan(plan)
    in_fp8, in_bf16 = (
        next(term.num_bytes for term in estimate_memory(plan.base, one).terms if term.name == "activations")
        for one in (recipe, replace(recipe, fp8_base=False))
    )
    tokens = recipe.micro_batch_size * recipe.sequence_length
    saved = 2 * plan.base.num_layers * tokens * (plan.base.hidden_size - 4)  # inputs of attention and MLP, less a scale
    assert in_bf16 - in_fp8 == pytest.approx(saved, rel=1e-6)


def test_small_bases_mixtures_nf4_and_machines_without_a_gpu_are_refused() -> None:
    """On an H200, SmolLM2-135M (hidden size 576) ended with a loss 2 % higher than in BF16, and was no faster."""
    with pytest.raises(InputError, match="no faster with a hidden size of 576"):
        plan_for(gpu="h200", base="HuggingFaceTB/SmolLM2-135M", config=FP8)
    with pytest.raises(InputError, match="mixtures of experts"):
        plan_for(gpu="h200", base="Qwen/Qwen3-30B-A3B", config=FP8)
    with pytest.raises(InputError, match="exclude each other"):
        plan_for(gpu="h200", config=FP8, overrides=["base_models.0.quantization=int4"])
    with pytest.raises(InputError, match="needs a GPU"):
        plan_for(gpu=None, profile="full", config=FP8)


@pytest.mark.parametrize(
    ("gpu", "config", "message"),
    [
        ("a100-80gb", {}, "compute capability 8.0"),
        (
            "h200",
            {"adapter_type": "ia3", "target_modules": ["q_proj", "down_proj"]},
            "does not support adapter_type ia3",
        ),
        ("h200", {"gradient_checkpointing": "selective"}, "selective checkpointing"),
        ("h200", {"strategy": "zero3"}, "not supported"),
    ],
)
def test_impossible_combinations_are_refused(gpu: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_for(gpu=gpu, config={**FP8, **config})


def test_precision_takes_precedence_over_bf16(write_manifest: WriteManifest) -> None:
    fp16 = str(write_manifest({"training.config.bf16": False, "training.config.fp16": True}))
    assert plan_for(gpu="h200", config={"precision": "fp32"}).precision.compute_dtype == "fp32"
    assert plan_for(fp16, gpu="h200", config={"precision": "bf16"}).precision.compute_dtype == "bf16"
