"""Shard only what must be sharded, offload only what must be offloaded, refuse what is known to be wrong."""

from __future__ import annotations

import pytest

from launcher.errors import InputError, ManifestError
from launcher.plan import Plan
from launcher.plan.ladder import take_rung
from tests.unit.plan.conftest import FULL_FINE_TUNING, decision, plan_for

INT4 = ("base_models.0.quantization=int4",)
INT8 = ("base_models.0.quantization=int8",)


def test_one_gpu_is_one_process() -> None:
    plan = plan_for()
    assert (plan.strategy, plan.offload) == ("single", "none")


def test_a_model_that_fits_each_gpu_is_replicated() -> None:
    plan = plan_for(gpu="rtx4090", gpus=4)
    assert plan.strategy == "ddp"
    assert "each GPU holds the whole model" in decision(plan, "strategy")


def test_a_model_that_does_not_is_sharded() -> None:
    plan = plan_for(gpu="h100", gpus=8, base="meta-llama/Llama-3.1-70B")
    assert plan.strategy == "fsdp2"
    assert "too large for one GPU" in decision(plan, "strategy")
    full = plan_for(gpu="h100", gpus=8, base="Qwen/Qwen3-8B", overrides=FULL_FINE_TUNING)
    assert full.strategy == "fsdp2"


def test_a_quantised_model_is_sharded_by_zero3_alone() -> None:
    plan = plan_for(gpu="rtx4090", gpus=8, base="meta-llama/Llama-3.1-70B", overrides=INT4)
    assert plan.strategy == "zero3"
    assert "not under FSDP2" in decision(plan, "strategy")
    assert plan.quantization is not None
    assert plan.quantization.storage_dtype == "bf16"


def test_offloading_is_the_last_resort_and_int4_is_pointed_out() -> None:
    plan = plan_for(gpu="rtx4090", base="Qwen/Qwen3-14B")
    assert plan.offload == "optimizer_and_parameters"
    assert plan.memory.host_bytes > 0
    assert any("quantization int4 it would fit without offloading" in note for note in plan.notes)


def test_quantised_plans() -> None:
    nf4 = plan_for(overrides=INT4).quantization
    assert nf4 is not None
    assert (nf4.kind, nf4.storage_dtype, nf4.double_quantization) == ("int4", "uint8", True)
    int8 = plan_for(overrides=INT8).quantization
    assert int8 is not None
    assert (int8.kind, int8.double_quantization) == ("int8", False)
    weights = [plan_for(overrides=way).memory.terms[0].num_bytes for way in ((), INT8, INT4)]
    assert weights == sorted(weights, reverse=True)
    assert len(set(weights)) == 3


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_strategy_that_is_asked_for_is_taken(strategy: str) -> None:
    asked = plan_for(gpu="h100", gpus=2, config={"strategy": strategy})
    assert asked.strategy == strategy
    assert "strategy in the manifest" in decision(asked, "strategy")
    flagged = plan_for(gpu="h100", gpus=2, strategy=strategy)
    assert flagged.strategy == strategy
    assert "| --strategy" in decision(flagged, "strategy")


def test_a_manifest_that_replicates_needs_no_ddp_on_one_gpu() -> None:
    assert plan_for(config={"strategy": "ddp"}).strategy == "single"
    assert plan_for(config={"strategy": "fsdp2"}).strategy == "fsdp2"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_the_command_line_is_taken_at_its_word_on_one_rank(strategy: str) -> None:
    assert plan_for(strategy=strategy).strategy == strategy
    assert plan_for(gpu=None, cpu_ranks_per_node=1, strategy=strategy).strategy == strategy


def test_without_a_gpu_there_is_one_process_unless_ranks_are_asked_for() -> None:
    asked = plan_for(gpu=None, strategy="fsdp2")
    assert asked.strategy == "single"
    assert "no GPU: one CPU process" in decision(asked, "strategy")
    ranks = plan_for(gpu=None, cpu_ranks_per_node=1)
    assert ranks.strategy == "single"
    assert "no GPU: one CPU process" in decision(ranks, "strategy")


def test_an_offload_that_is_asked_for_is_taken() -> None:
    assert plan_for(config={"offload": "optimizer"}).strategy == "zero2"
    moved = plan_for(config={"offload": "optimizer_and_parameters"})
    assert (moved.strategy, moved.offload) == ("zero3", "optimizer_and_parameters")


@pytest.mark.parametrize(
    ("overrides", "config", "message"),
    [
        (INT4, {"strategy": "fsdp2"}, "NF4 weights come apart under FSDP2"),
        (INT8, {"strategy": "zero3"}, "int8 weights do not run under zero3; use ddp"),
        (INT8, {"strategy": "zero2"}, "int8 weights do not run under zero2; use ddp"),
        (INT8, {"offload": "optimizer"}, "int8 weights do not run under DeepSpeed"),
        ((), {"strategy": "zero2", "optim": "adamw_bnb_8bit"}, "adamw_bnb_8bit keeps its state per rank"),
        ((), {"strategy": "ddp", "offload": "optimizer"}, "offload optimizer is done by DeepSpeed, not by ddp"),
        ((), {"strategy": "zero2", "offload": "optimizer_and_parameters"}, "offloading them needs zero3"),
        ((), {"offload": "optimizer", "optim": "adamw_bnb_8bit"}, "offloaded optimizer state is stepped on the CPU"),
        (INT4, {"offload": "optimizer_and_parameters"}, "quantised parameters cannot be offloaded"),
    ],
)
def test_combinations_known_to_be_wrong(overrides: tuple[str, ...], config: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_for(gpu="h100", gpus=2, overrides=overrides, config=config)
    assert message in str(caught.value)
    assert "known to be wrong" in caught.value.title


def test_wrong_combinations_are_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        plan_for(gpu="h100", gpus=2, overrides=INT4, config={"strategy": "fsdp2", "optim": "adamw_bnb_8bit"})
    assert len(caught.value.problems) == 2


def test_full_fine_tuning_of_quantised_weights_is_refused() -> None:
    with pytest.raises(ManifestError, match="adapter_type full cannot train weights stored as int4"):
        plan_for(overrides=(*INT4, *FULL_FINE_TUNING))


def test_quantisation_needs_a_gpu() -> None:
    with pytest.raises(InputError, match="int4 needs a CUDA GPU") as caught:
        plan_for(gpu=None, profile="full", overrides=INT4)
    assert "--gpu NAME" in caught.value.hint
    smoke = plan_for(gpu=None, overrides=INT4)
    assert smoke.quantization is None
    assert "the tiny base needs no saving" in decision(smoke, "base weights")


def test_8_bit_adamw_needs_a_gpu() -> None:
    config = {"optim": "adamw_bnb_8bit"}
    with pytest.raises(InputError, match="adamw_bnb_8bit needs a CUDA GPU"):
        plan_for(gpu=None, profile="full", config=config)
    assert plan_for(gpu=None, config=config).optimizer.name == "adamw_torch"
    assert plan_for(config=config).optimizer.name == "adamw_bnb_8bit"


@pytest.mark.parametrize(("ram", "is_told"), [(128.0, True), (1024.0, False)])
def test_a_checkpoint_that_fills_the_host_is_told(ram: float, is_told: bool) -> None:
    plan = plan_for(gpu="h100", gpus=8, base="Qwen/Qwen3-8B", overrides=FULL_FINE_TUNING, ram_gib_per_node=ram)
    assert any("a checkpoint takes 91.5 GiB of CPU memory" in note for note in plan.notes) == is_told


def test_zero3_compiles_nothing_unless_asked() -> None:
    plan = plan_for(gpu="h100", gpus=8, strategy="zero3", base="Qwen/Qwen3-8B")
    assert plan.compile is None
    assert "every layer is compiled by itself" in decision(plan, "torch.compile")
    asked = plan_for(gpu="h100", gpus=8, strategy="zero3", base="Qwen/Qwen3-8B", config={"torch_compile": True})
    assert asked.compile is not None


def test_a_rung_to_zero3_is_as_a_plan_for_it() -> None:
    lower: Plan | None = plan_for(gpu="rtx4090", gpus=2, base="Qwen/Qwen3-8B", overrides=INT4)
    while lower is not None and lower.strategy != "zero3":
        lower = take_rung(lower)
    assert lower is not None
    assert lower.quantization is not None
    assert lower.quantization.storage_dtype == "bf16"
    assert lower.compile is None
