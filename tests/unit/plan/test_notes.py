"""Settings that only cost speed: named, with what they cost and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.core.units import format_count
from launcher.plan import Plan
from launcher.plan.speed_estimate import _format_error
from launcher.request.request import Request, plan_request
from tests.unit.plan.conftest import decision, plan_for

OPTIMIZERS = ("adamw_bnb_8bit", "adamw_torch_fused")
SLOW = {"gradient_checkpointing": True, "torch_compile": False}


def find_note(plan: Plan) -> str | None:
    found = [note for note in plan.notes if "set by --set slow" in note]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("gpu", ["rtx4090", "h200"])
def test_note_on_slow_settings_is_confirmed_by_the_plan_without_them(gpu: str) -> None:
    config = {**SLOW, "attention": "varlen", "max_steps": 20_000}  # long enough for compiling to pay off
    slow = plan_for(gpu=gpu, config=config)
    note = find_note(slow)
    assert note is not None
    changes = dict(re.findall(r"--set training\.config\.(\w+)=(\w+)", note))
    assert changes == dict.fromkeys(SLOW, "null")  # the attention costs nothing by the model
    free = plan_for(gpu=gpu, config={**config, **dict.fromkeys(SLOW)})
    assert free.speed.tokens_per_second is not None
    assert slow.speed.tokens_per_second is not None
    times = free.speed.tokens_per_second / slow.speed.tokens_per_second
    assert times > 1.1
    assert f"{times:.1f} times as fast" in note
    assert find_note(free) is None


def test_note_names_only_settings_that_slow_training() -> None:
    note = find_note(plan_for(gpu="rtx4090", config={"gradient_checkpointing": True, "torch_compile": True}))
    assert note is not None
    assert note.startswith("gradient_checkpointing set by --set slows training down")
    assert "torch_compile" not in note


@pytest.mark.parametrize(
    ("gpu", "config", "profile"),
    [
        ("rtx4090", {}, "full"),  # nothing is given
        ("rtx4090", {"gradient_checkpointing": False}, "full"),  # as the plan would
        ("rtx4090", SLOW, "smoke"),
        (None, SLOW, "full"),
    ],
)
def test_no_note_without_slow_settings(gpu: str | None, config: dict[str, object], profile: str) -> None:
    left = {"gradient_checkpointing": None, "torch_compile": None}
    assert find_note(plan_for(gpu=gpu, config={**left, **config}, profile=profile)) is None


def test_plan_that_fits_only_with_slow_settings_is_a_plan() -> None:
    """The comparison with the plan's own choice must not fail if that does not fit."""
    config = {"adapter_type": "dora", "max_seq_length": 16384, "gradient_checkpointing": True, "torch_compile": True}
    plan = plan_for(gpu="rtx3070tilaptop", base="Qwen/Qwen3-1.7B", config=config)
    assert plan.memory.total_bytes <= plan.memory.usable_bytes
    assert find_note(plan) is None


@pytest.mark.parametrize("request_", [{"config": {"strategy": "zero3"}}, {"strategy": "zero3"}], ids=str)
def test_strategy_that_slows_training_has_a_note(request_: dict[str, Any]) -> None:
    planned: dict[str, Any] = {"gpu": "rtx5080laptop", "base": "Qwen/Qwen3-4B"}
    slow, free = plan_for(**planned, **request_), plan_for(**planned)
    (note,) = (note for note in slow.notes if "slows training down" in note)
    assert ("without --strategy" in note) == ("strategy" in request_)
    assert free.speed.tokens_per_second
    assert slow.speed.tokens_per_second
    assert f"{free.speed.tokens_per_second / slow.speed.tokens_per_second:.1f} times as fast" in note


@pytest.mark.parametrize(
    ("planned", "is_noted"),
    [
        ({"gpu": "rtx4070", "base": "Qwen/Qwen3-8B"}, True),
        ({"gpu": "rtx3050", "gpus": 6, "nodes": 2, "base": "Qwen/Qwen3-14B"}, True),  # fits without offloading
        ({"gpu": "t4", "base": "Qwen/Qwen3-8B"}, False),  # dequantization takes as long as offloading
        ({"gpu": "h100"}, False),
        ({"gpu": "v100-pcie-32gb", "base": "Qwen/Qwen3-14B", "config": {"packing": False}}, False),  # no faster
        ({"gpu": "rtx3080laptop", "config": {"offload": "optimizer"}}, False),  # stays in CPU memory
    ],
    ids=str,
)
def test_note_on_int4_is_confirmed_by_the_plan_with_it(planned: dict[str, Any], is_noted: bool) -> None:
    plan, other = plan_for(**planned), plan_for(**planned, overrides=("base_models.0.quantization=int4",))
    notes = [note for note in plan.notes if note.startswith("with base_models[0].quantization int4")]
    assert len(notes) == is_noted
    if notes:
        assert plan.speed.tokens_per_second
        assert other.speed.tokens_per_second
        assert f"{other.speed.tokens_per_second / plan.speed.tokens_per_second:.1f} times as fast" in notes[0]
        assert ("without offloading" in notes[0]) == (plan.offload != "none")
        assert other.offload == "none"


@pytest.mark.parametrize(
    ("config", "change", "name"),
    [
        ({"packing": False}, {"packing": True}, "packing true"),
        ({"precision": "fp32"}, {"precision": "bf16"}, "precision bf16"),
    ],
    ids=str,
)
def test_setting_that_would_be_faster_has_a_note(config: dict[str, Any], change: dict[str, Any], name: str) -> None:
    plan, other = plan_for(config=config), plan_for(config=change)
    assert plan.speed.tokens_per_second
    assert other.speed.tokens_per_second
    times = other.speed.tokens_per_second / plan.speed.tokens_per_second
    assert any(f"with {name} it would train about {times:.1f} times as fast" in note for note in plan.notes)


def test_8_bit_optimizer_decision_mentions_the_host_sync() -> None:
    decisions = {name: decision(plan_for(gpu="h200", config={"optim": name}), "optimizer") for name in OPTIMIZERS}
    assert [name for name, words in decisions.items() if "waits for the host to read the gradients" in words] == [
        "adamw_bnb_8bit"
    ]


def test_defaults_are_not_attributed_to_the_manifest() -> None:
    plan = plan_for(overrides=("training.config.max_grad_norm=null",))
    (clipping,) = (one for one in plan.decisions if one.name == "gradient clipping")
    assert (clipping.value, clipping.decided_by) == ("norm 1", "plan")
    (wandb,) = (one for one in plan_for(config={"wandb": {}}).decisions if one.name == "W&B")
    assert (wandb.value, wandb.decided_by) == ("online with an API key, else off", "plan")


def test_full_fine_tuning_with_a_lora_learning_rate_is_noted() -> None:
    full = "training.config.adapter_type=full"
    noted = plan_for(gpu="h100", overrides=(full, "training.config.learning_rate=2e-4"))
    assert any("full fine-tuning usually needs about a tenth, such as 2e-05" in note for note in noted.notes)
    plan = plan_for(gpu="h100", overrides=(full,))
    assert plan.optimizer.learning_rate == 2e-5
    assert not any("usually needs about a tenth" in note for note in plan.notes)
    (rate,) = (one for one in plan.decisions if one.name == "learning rate")
    assert rate.reason.startswith("default of full fine-tuning")


@pytest.mark.parametrize(("error", "text"), [(0.2, "within about 20 %"), (1.29, "very uncertain (0.4 to 2.3 times")])
def test_large_errors_are_no_percentages(error: float, text: str) -> None:
    assert _format_error(error).startswith(text)


@pytest.mark.parametrize(
    ("flags", "name", "reason"),
    [
        ({"max_steps": 40}, "training length", "--max-steps"),
        ({"overrides": ["training.config.max_steps=40"]}, "training length", "--set training.config.max_steps"),
        ({"overrides": ["training.config.rank=8"]}, "adapter", "--set training.config.rank"),
        ({"overrides": ["training.config.learning_rate=1e-4"]}, "learning rate", "--set training.config.learning_rate"),
        ({"overrides": ["training.config.warmup_ratio=0.1"]}, "learning rate", "--set training.config.warmup_ratio"),
        (
            {"overrides": ["training.config.batch_size=4"]},
            "global batch",
            "--set training.config.batch_size; batch_size",
        ),
        (
            {"overrides": ["training.config.save_total_limit=9"]},
            "checkpoints",
            "--set training.config.save_total_limit",
        ),
        ({"overrides": ["training.config.logging_steps=9"]}, "logging", "--set training.config.logging_steps"),
        ({"overrides": ["training.config.torch_compile=true"]}, "torch.compile", "--set training.config.torch_compile"),
        ({"overrides": ["evaluation.task_rows=5"]}, "task eval", "--set evaluation.task_rows"),
        ({"overrides": ["training.config.wandb.mode=offline"]}, "W&B", "--wandb"),
    ],
)
def test_values_of_flags_are_not_attributed_to_the_manifest(flags: dict[str, Any], name: str, reason: str) -> None:
    plan = plan_request(Request(expert="neo4j", gpu="rtx4090", **flags)).plan
    (decision,) = (decision for decision in plan.decisions if decision.name == name)
    assert decision.decided_by == "command line"
    assert decision.reason.startswith(reason)
    assert "in the manifest" not in decision.reason
    unset = plan_request(Request(expert="neo4j", gpu="rtx4090")).plan
    assert not any(decision.decided_by == "command line" for decision in unset.decisions)


def test_warmup_longer_than_the_run_has_a_note() -> None:
    overrides = ["training.config.warmup_steps=100", "training.config.warmup_ratio=null"]
    notes = plan_request(Request(expert="neo4j", gpu="rtx4090", max_steps=40, overrides=overrides)).plan.notes
    assert any(note.startswith("all 40 steps of this run are warm-up (warmup_steps is 100)") for note in notes)
    notes = plan_request(Request(expert="neo4j", gpu="rtx4090", max_steps=400, overrides=overrides)).plan.notes
    assert not any("warm-up" in note for note in notes)
    smoke = plan_request(Request(expert="neo4j", profile="smoke", max_steps=3)).plan
    assert (smoke.schedule.warmup_steps, [note for note in smoke.notes if "warm-up" in note]) == (5, [])


def test_size_of_full_logits_is_stated() -> None:
    plan = plan_request(Request(expert="neo4j", gpu="rtx4090")).plan
    (reason,) = (decision.reason for decision in plan.decisions if decision.name == "loss")
    assert reason == "the full logits are never held in memory: 1.2 GiB in FP32 for each sequence of a micro-step"


@pytest.mark.parametrize(
    ("config", "is_noted"),
    [
        ({"learning_rate": 0.1}, True),
        ({"learning_rate": 1e-3}, False),
        ({"learning_rate": 0.1, "optim": "sgd"}, False),
    ],
)
def test_very_high_learning_rate_of_an_adapter_is_noted(config: dict[str, Any], is_noted: bool) -> None:
    notes = plan_for(config=config).notes
    assert any("is very high and likely to diverge" in note for note in notes) is is_noted


@pytest.mark.parametrize(
    ("gpu", "base", "is_unneeded"),
    [
        ("rtx4090", None, True),
        ("h200", "Qwen/Qwen3-8B", True),
        ("rtx4090", "Qwen/Qwen3-8B", False),  # unquantized only with full checkpointing: slower
        ("rtx4090", "Qwen/Qwen3-14B", False),  # fits only in NF4
    ],
)
def test_int4_is_noted_where_the_base_also_fits_unquantized_and_trains_as_fast(
    gpu: str, base: str | None, is_unneeded: bool
) -> None:
    def plan(quantization: str) -> Plan:
        overrides = (f"base_models.0.quantization={quantization}",)
        return plan_request(Request(expert="neo4j", gpu=gpu, base=base, profile="full", overrides=overrides)).plan

    quantized = plan("int4")
    notes = [note for note in quantized.notes if note.startswith("int4 is not needed here")]
    assert len(notes) == is_unneeded
    if is_unneeded:
        unquantized = plan("none").speed.tokens_per_second
        assert unquantized is not None
        assert f"{format_count(unquantized)} tokens/s" in notes[0]
        assert unquantized >= (quantized.speed.tokens_per_second or 0.0)


def test_evaluations_larger_than_a_micro_batch_are_not_in_the_memory_estimate() -> None:
    def notes(**config: object) -> list[str]:
        plan = plan_for(gpu="h100", config=config)
        return [note for note in plan.notes if note.startswith("eval_batch_size")]

    assert notes(eval_batch_size=1) == notes() == []
    assert notes(eval_batch_size=999) == [
        "eval_batch_size 999 exceeds the micro-batch of 24: the predicted memory does not include such evaluations"
    ]


def test_trace_after_the_last_step_has_a_note() -> None:
    def notes(first: int) -> list[str]:
        plan = plan_for(gpu="h100", max_steps=20, profile_steps=(first, first + 1))
        return [note for note in plan.notes if "traced" in note]

    assert notes(20) == []
    assert notes(21) == ["nothing will be traced: --profile-steps starts at step 21 of 20"]
