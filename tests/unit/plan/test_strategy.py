"""Shard only what must be sharded, offload only what must be offloaded, refuse what is not supported."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.core.errors import InputError, ManifestError
from launcher.core.units import GIB
from launcher.plan import Plan
from launcher.plan.estimator_inputs import estimate_plan_memory
from launcher.plan.memory_budget import SearchInputs
from launcher.plan.oom_fallbacks import apply_next_fallback
from launcher.plan.search import Layout, find_best_layout
from launcher.plan.strategy import Candidate
from tests.conftest import WriteManifest
from tests.unit.plan.conftest import FULL_FINE_TUNING, decision, plan_for

INT4 = ("base_models.0.quantization=int4",)
INT8 = ("base_models.0.quantization=int8",)


def test_one_gpu_is_one_process() -> None:
    plan = plan_for()
    assert (plan.strategy, plan.offload) == ("single", "none")


def test_a_model_that_fits_each_gpu_is_replicated() -> None:
    plan = plan_for(gpu="rtx4090", gpus=4)
    assert plan.strategy == "ddp"
    assert "the full model fits on each GPU" in decision(plan, "strategy")


def test_sharding_that_is_somewhat_faster_is_mentioned() -> None:
    plan = plan_for(gpu="h100", gpus=8, base="Qwen/Qwen3-32B")
    assert plan.strategy == "ddp"
    assert re.search(r"; --strategy fsdp2 is estimated to be 1\d(\.\d)? % faster", decision(plan, "strategy"))
    assert "faster" not in decision(plan_for(gpu="h100", gpus=8, base="Qwen/Qwen3-0.6B"), "strategy")


def test_a_model_that_does_not_is_sharded() -> None:
    plan = plan_for(gpu="h100", gpus=8, base="meta-llama/Llama-3.1-70B")
    assert plan.strategy == "fsdp2"
    assert "do not fit on one GPU" in decision(plan, "strategy")
    full = plan_for(gpu="h100", gpus=8, base="Qwen/Qwen3-8B", overrides=FULL_FINE_TUNING)
    assert full.strategy == "fsdp2"


def test_several_nodes_are_sharded_inside_a_node_where_that_is_faster() -> None:
    base = "meta-llama/Llama-3.1-70B"
    plan, fsdp2 = (plan_for(gpu="h100", gpus=8, nodes=4, base=base, strategy=name) for name in (None, "fsdp2"))
    assert plan.strategy == "hsdp"
    assert "HSDP, 4 replicas of 8 shards" in decision(plan, "strategy")
    assert "only gradients use the network" in decision(plan, "strategy")
    assert plan.speed.tokens_per_second > 1.1 * fsdp2.speed.tokens_per_second  # type: ignore[operator]
    weights = plan.memory.terms[0].num_bytes
    assert weights == pytest.approx(4 * fsdp2.memory.terms[0].num_bytes, rel=1e-3), "a shard of 8 instead of 32"
    assert plan.oom_fallbacks[-2].strategy == "fsdp2"
    small = plan_for(gpu="a100-40gb", gpus=2, nodes=4, base=base)
    assert small.strategy == "fsdp2", "70B does not fit on two GPUs"


def test_hsdp_needs_several_nodes_of_several_gpus() -> None:
    with pytest.raises(InputError) as caught:
        plan_for(gpu="h100", gpus=8, strategy="hsdp")
    assert "one node, where it is the same as FSDP2; use fsdp2" in str(caught.value)
    with pytest.raises(InputError) as caught:
        plan_for(gpu="h100", gpus=1, nodes=4, strategy="hsdp")
    assert "each node has one; use ddp" in str(caught.value)
    assert plan_for(gpu="h100", gpus=8, nodes=2, strategy="hsdp", overrides=INT4).strategy == "hsdp"


def test_memory_of_a_finished_hsdp_plan_is_that_of_one_node() -> None:
    plan = plan_for(gpu="h100", gpus=8, nodes=2, strategy="hsdp", base="Qwen/Qwen3-8B", config={"adapter_type": "full"})
    assert estimate_plan_memory(plan).terms == plan.memory.terms


def test_a_quantised_model_is_sharded() -> None:
    plan = plan_for(gpu="rtx4090", gpus=8, base="meta-llama/Llama-3.1-70B", overrides=INT4)
    assert plan.strategy == "fsdp2"
    assert "do not fit on one GPU" in decision(plan, "strategy")
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
    whole, quantized = (plan_for(overrides=way).memory.terms[0].num_bytes for way in ((), INT4))
    assert quantized < whole
    with pytest.raises(ManifestError, match=r"int8 .* is not supported.* 24,295 tokens/s") as caught:
        plan_for(overrides=INT8)
    assert "use int4 (NF4)" in caught.value.hint


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_strategy_that_is_asked_for_is_taken(strategy: str) -> None:
    asked = plan_for(gpu="h100", gpus=2, config={"strategy": strategy})
    assert asked.strategy == strategy
    assert "| --set training.config.strategy" in decision(asked, "strategy")
    flagged = plan_for(gpu="h100", gpus=2, strategy=strategy)
    assert flagged.strategy == strategy
    assert "| --strategy" in decision(flagged, "strategy")


def test_a_manifest_that_replicates_needs_no_ddp_on_one_gpu() -> None:
    assert plan_for(config={"strategy": "ddp"}).strategy == "single"
    assert plan_for(config={"strategy": "fsdp2"}).strategy == "fsdp2"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_requested_strategy_is_used_on_one_rank(strategy: str) -> None:
    assert plan_for(strategy=strategy).strategy == strategy
    assert plan_for(gpu=None, cpu_ranks_per_node=1, strategy=strategy).strategy == strategy


def test_without_a_gpu_there_is_one_process_unless_ranks_are_requested() -> None:
    with pytest.raises(InputError, match="--strategy fsdp2 has no effect: this machine has no GPU"):
        plan_for(gpu=None, strategy="fsdp2")
    ranks = plan_for(gpu=None, cpu_ranks_per_node=1)
    assert ranks.strategy == "single"
    assert "no GPU: one CPU process" in decision(ranks, "strategy")


def test_requested_offload_is_used() -> None:
    assert plan_for(config={"offload": "optimizer"}).strategy == "zero2"
    moved = plan_for(config={"offload": "optimizer_and_parameters"})
    assert (moved.strategy, moved.offload) == ("zero3", "optimizer_and_parameters")
    assert decision(moved, "strategy").endswith("| --set training.config.offload")


def test_offload_that_the_plan_adds_to_a_requested_strategy_has_its_reason() -> None:
    plan = plan_for(gpu="rtx4090", strategy="zero2", overrides=FULL_FINE_TUNING, base="Qwen/Qwen3-1.7B")
    assert plan.offload == "optimizer"
    assert "--strategy; fits only with offloading to CPU memory" in decision(plan, "strategy")


@pytest.mark.parametrize(
    ("config", "base", "message"),
    [
        ({"modules_to_save": ["embed_tokens"]}, None, "does not support modules_to_save"),
        ({"precision": "fp8"}, "Qwen/Qwen3-8B", "does not support precision fp8"),
        ({"target_modules": ["q_proj"]}, "Qwen/Qwen3-30B-A3B", "not verified for mixtures of experts"),
    ],
)
def test_requested_offload_is_refused_where_deepspeed_cannot_train(
    config: dict[str, object], base: str | None, message: str
) -> None:
    assert plan_for(gpu="h100", gpus=2, config=config, base=base).offload == "none"
    with pytest.raises(InputError) as caught:
        plan_for(gpu="h100", gpus=2, config={**config, "offload": "optimizer"}, base=base)
    assert message in str(caught.value)
    assert caught.value.problems[0].where == "training.config.offload"


@pytest.mark.parametrize(
    ("flags", "config", "hint"),
    [
        ({"strategy": "hsdp"}, {}, "or omit --strategy to let the plan decide"),
        ({}, {"strategy": "hsdp"}, 'or set strategy to "auto" to let the plan decide'),
        (
            {"strategy": "ddp"},
            {"offload": "optimizer"},
            'or omit --strategy and set offload to "auto" to let the plan decide',
        ),
    ],
)
def test_hint_of_an_unsupported_combination_names_what_was_set(
    flags: dict[str, Any], config: dict[str, object], hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        plan_for(gpu="h100", gpus=2, config=config, **flags)
    assert caught.value.hint == hint


@pytest.mark.parametrize("override", ["training.config.strategy=fsdp2", "training.config.offload=optimizer"])
def test_parallelism_by_flag_is_refused_for_one_cpu_process(write_manifest: WriteManifest, override: str) -> None:
    with pytest.raises(InputError, match=f"{override} has no effect"):
        plan_for(gpu=None, overrides=(override,))
    key, _, value = override.partition("=")
    assert plan_for(str(write_manifest({key: value})), gpu=None).strategy == "single"


@pytest.mark.parametrize(
    ("overrides", "config", "message"),
    [
        (
            (),
            {"strategy": "zero2", "optim": "adamw_bnb_8bit"},
            "zero2 does not support adamw_bnb_8bit",
        ),
        (
            (),
            {"strategy": "ddp", "offload": "optimizer"},
            "ddp does not support offload optimizer",
        ),
        ((), {"strategy": "zero2", "offload": "optimizer_and_parameters"}, "use zero3 to offload them"),
        ((), {"offload": "optimizer", "optim": "adamw_bnb_8bit"}, "an offloaded optimizer runs on the CPU"),
        (INT4, {"offload": "optimizer_and_parameters"}, "quantized parameters cannot be offloaded"),
    ],
)
def test_unsupported_combination_is_refused(
    overrides: tuple[str, ...], config: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        plan_for(gpu="h100", gpus=2, overrides=overrides, config=config)
    assert message in str(caught.value)
    assert "is not supported" in caught.value.title


def test_all_unsupported_combinations_are_listed_at_once() -> None:
    with pytest.raises(InputError) as caught:
        plan_for(gpu="h100", gpus=2, config={"strategy": "fsdp2", "optim": "adamw_bnb_8bit", "offload": "optimizer"})
    assert len(caught.value.problems) == 3


def test_full_fine_tuning_of_quantised_weights_is_refused() -> None:
    with pytest.raises(ManifestError, match="adapter_type full cannot train int4 weights"):
        plan_for(overrides=(*INT4, *FULL_FINE_TUNING))


def test_quantisation_needs_a_gpu() -> None:
    with pytest.raises(InputError, match="int4 needs a CUDA GPU") as caught:
        plan_for(gpu=None, profile="full", overrides=INT4)
    assert "--gpu NAME" in caught.value.hint
    smoke = plan_for(gpu=None, overrides=INT4)
    assert smoke.quantization is None
    assert "the tiny base is small enough" in decision(smoke, "quantization")


def test_8_bit_adamw_needs_a_gpu() -> None:
    config = {"optim": "adamw_bnb_8bit"}
    with pytest.raises(InputError, match="adamw_bnb_8bit needs a CUDA GPU"):
        plan_for(gpu=None, profile="full", config=config)
    assert plan_for(gpu=None, config=config).optimizer.name == "adamw_torch"
    assert plan_for(config=config).optimizer.name == "adamw_bnb_8bit"


@pytest.mark.parametrize(("ram", "is_sharded"), [(128.0, True), (1024.0, False)])
def test_checkpoint_larger_than_cpu_memory_is_sharded(ram: float, is_sharded: bool) -> None:
    plan = plan_for(gpu="h100", gpus=8, base="Qwen/Qwen3-8B", overrides=FULL_FINE_TUNING, ram_gib_per_node=ram)
    assert plan.shards_checkpoints == is_sharded
    text = decision(plan, "checkpoint writing")
    assert f"91.5 GiB of the {ram:.1f} GiB of CPU memory" in text
    if is_sharded:
        assert "training waits until a checkpoint is on disk" in text
        assert plan.memory.saving_bytes < 12 * GIB
        assert "one set of shards per rank" in text
    else:
        assert plan.memory.saving_bytes > 91 * GIB
        assert "written in the background" in text


def test_deepspeed_writes_large_checkpoints_tensor_by_tensor() -> None:
    """Offloaded states fill the host already, so a second copy does not fit."""
    config = {"strategy": "zero2", "offload": "optimizer"}
    plan = plan_for(gpu="h100", base="Qwen/Qwen3-8B", overrides=FULL_FINE_TUNING, config=config, ram_gib_per_node=200.0)
    assert plan.memory.host_bytes > 80 * GIB
    assert plan.shards_checkpoints
    assert "tensor by tensor on rank 0" in decision(plan, "checkpoint writing")


def test_adapters_are_gathered_without_a_decision() -> None:
    plan = plan_for(gpu="h100", gpus=8, ram_gib_per_node=1.0)
    assert not plan.shards_checkpoints
    assert all(decision.name != "checkpoint writing" for decision in plan.decisions)


@pytest.mark.parametrize(
    ("strategy", "offload", "is_noted"),
    [
        ("zero1", "none", True),
        ("zero1", "optimizer", True),
        ("zero2", "optimizer", True),
        ("zero2", "none", False),
        ("zero3", "none", False),
        ("fsdp2", "none", False),
    ],
)
def test_strategies_that_do_not_sum_gradients_in_fp32_are_noted(strategy: str, offload: str, is_noted: bool) -> None:
    config = {"strategy": strategy, "offload": offload, "batch_size": 256, "gradient_accumulation_steps": 1}
    plan = plan_for(gpu="rtx4090", gpus=2, base="Qwen/Qwen3-8B", config=config)
    assert plan.strategy == strategy
    assert plan.batch.gradient_accumulation_steps > 1
    assert any("adds up gradients of micro-steps in BF16" in note for note in plan.notes) == is_noted


def test_one_micro_step_has_no_note_on_gradient_sums() -> None:
    config = {"strategy": "zero1", "batch_size": 2, "gradient_accumulation_steps": 1}
    plan = plan_for(gpu="h200", gpus=2, config=config)
    assert plan.batch.gradient_accumulation_steps == 1
    assert not any("adds up gradients" in note for note in plan.notes)


def test_zero3_compiles_where_it_was_measured() -> None:
    plan = plan_for(gpu="h100", gpus=8, strategy="zero3", base="Qwen/Qwen3-8B")
    assert plan.compile is not None
    assert plan.compile.scope == "layer"


@pytest.mark.parametrize("overrides", [INT4, ("training.config.offload=optimizer",)], ids=["nf4", "offload"])
def test_zero3_with_nf4_or_offload_compiles_only_on_request(overrides: tuple[str, ...]) -> None:
    plan = plan_for(gpu="h100", gpus=8, strategy="zero3", base="Qwen/Qwen3-8B", overrides=overrides)
    assert plan.compile is None
    assert "compiled layers under ZeRO-3 were not measured" in decision(plan, "torch.compile")
    config = {"torch_compile": True}
    requested = plan_for(gpu="h100", gpus=8, strategy="zero3", base="Qwen/Qwen3-8B", overrides=overrides, config=config)
    assert requested.compile is not None
    lower = apply_next_fallback(requested)
    assert lower is not None
    assert (lower.strategy, lower.offload == requested.offload) == ("zero3", lower.compile is not None)


def test_fallback_to_zero3_equals_a_plan_for_it() -> None:
    lower: Plan | None = plan_for(gpu="rtx4090", gpus=2, base="Qwen/Qwen3-8B", overrides=INT4)
    while lower is not None and lower.strategy != "zero3":
        lower = apply_next_fallback(lower)
    assert lower is not None
    assert lower.quantization is not None
    assert lower.quantization.storage_dtype == "bf16"
    assert lower.compile is None


def test_compiling_is_compared_with_the_best_layout_without_it() -> None:
    """Layers that are not compiled may not fit without checkpointing, which costs far more than slower kernels."""
    chosen, eager = (
        plan_for(gpu="h100", gpus=8, nodes=4, base="meta-llama/Llama-3.1-70B", config={"torch_compile": value})
        for value in (None, False)
    )
    assert chosen.compile is not None
    assert "saves about" in decision(chosen, "torch.compile")
    assert chosen.checkpointing == "none"
    assert eager.checkpointing != "none"
    assert chosen.speed.tokens_per_second > 1.3 * eager.speed.tokens_per_second  # type: ignore[operator]


def test_training_that_fits_only_with_compiled_layers_is_compiled() -> None:
    chosen = plan_for(gpu="h200", base="Qwen/Qwen3-8B", config={"adapter_type": "full"})
    assert chosen.compile is not None
    assert "fits only with it" in decision(chosen, "torch.compile")


def test_training_that_fits_only_without_compiled_layers_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(inputs: SearchInputs, candidates: tuple[Candidate, ...]) -> Layout | None:
        return None if inputs.workload.compiled else find_best_layout(inputs, candidates)

    monkeypatch.setattr("launcher.plan.make.find_best_layout", find)
    chosen = plan_for(gpu="h200", base="Qwen/Qwen3-8B")
    assert chosen.compile is None
    assert "fits only without it" in decision(chosen, "torch.compile")


def test_compiling_is_off_where_it_was_not_measured() -> None:
    assert "not measured on GPUs before Ampere" in decision(plan_for(gpu="t4"), "torch.compile")
    assert plan_for(gpu="t4", config={"torch_compile": True}).compile is not None
