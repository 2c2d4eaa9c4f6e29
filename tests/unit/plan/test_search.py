"""Search for a plan that fits: budgets, OOM fallbacks, suggestions, and properties over manifests x hardware."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.base_models.shapes import ModelShape, load_shape
from launcher.core.errors import DoesNotFitError, ExitCode, ManifestError
from launcher.core.units import GIB, bytes_to_gib
from launcher.hardware.gpu_catalogue import GPUS, lookup_gpu
from launcher.hardware.model import Gpu, make_hardware
from launcher.manifest import Manifest, find_manifest, load_manifest
from launcher.plan import Plan, make_plan
from launcher.plan.estimate.dataset_size import RowEstimate
from launcher.plan.memory_budget import LEVELS
from tests.conftest import published_manifests
from tests.unit.plan.conftest import FULL_FINE_TUNING, decision, plan_for

pytestmark = pytest.mark.long

ROWS = RowEstimate(num_rows=30_000, mean_tokens=350, count_basis="read", is_measured=True)
MANIFESTS = [  # every fourth published one; `make test-all` plans all
    "neo4j",
    *(
        pytest.param(str(file), marks=[pytest.mark.slow] if at % 4 else [])
        for at, file in enumerate(published_manifests())
    ),
]
BASES = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"]


@cache
def load(name: str, full: bool = False) -> Manifest:
    return load_manifest(find_manifest(name), FULL_FINE_TUNING if full else ()).manifest


@cache
def shape(name: str) -> ModelShape:
    return load_shape(name, ())


def plan_on(manifest: Manifest, gpu: Gpu, base: str, gpus: int = 1, nodes: int = 1) -> Plan | None:
    hardware = make_hardware(gpu, gpus_per_node=gpus, nodes=nodes, ram_gib_per_node=64 * gpus)
    try:
        return make_plan(manifest, hardware, base=shape(base), rows=ROWS)
    except DoesNotFitError:
        return None


def id_of(name: str) -> str:
    return Path(name).name


@pytest.mark.parametrize("name", MANIFESTS, ids=id_of)
@pytest.mark.parametrize("base", BASES)
def test_predicted_memory_never_exceeds_what_is_usable(name: str, base: str) -> None:
    planned = 0
    for gpu in {gpu.memory_mib // 1024: gpu for gpu in GPUS.values()}.values():
        plan = plan_on(load(name), gpu, base)
        if plan is not None:
            assert plan.memory.total_bytes <= plan.memory.usable_bytes
            assert plan.memory.margin_bytes >= 0
            planned += 1
    assert planned > 5


@pytest.mark.parametrize("name", MANIFESTS, ids=id_of)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_more_memory_never_means_more_checkpointing_or_a_smaller_micro_batch(name: str, base: str, gpus: int) -> None:
    """The same GPU with more and more memory, as long as each rank holds the whole model.

    It cannot hold across strategies: where weights have to be gathered or fetched for every micro-step, recomputing for
    fewer and larger micro-steps is faster; with more memory nothing is gathered, and the small micro-batch is.
    """
    best: dict[str, tuple[int, int]] = {}
    planned = 0
    for gib in range(8, 150, 6):
        gpu = lookup_gpu("h100").model_copy(update={"memory_mib": gib * 1024})
        plan = plan_on(load(name), gpu, base, gpus)
        if plan is None:
            assert planned == 0, "it fitted with less memory"
            continue
        planned += 1
        if plan.strategy not in ("single", "ddp"):
            continue
        level, micro = best.get(plan.strategy + plan.offload, (len(LEVELS), 0))
        assert LEVELS.index(plan.checkpointing) <= level
        assert plan.batch.micro_batch_size >= micro
        best[plan.strategy + plan.offload] = (LEVELS.index(plan.checkpointing), plan.batch.micro_batch_size)
    assert planned > 5


@pytest.mark.parametrize("name", MANIFESTS, ids=id_of)
@pytest.mark.parametrize(
    ("card", "sizes"), [("rtx4090", (12, 16, 20, 24, 32, 48)), ("h100", (40, 64, 80, 96, 141, 180))]
)
@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_for_the_experts_that_holds_across_strategies_too(
    name: str, card: str, sizes: tuple[int, ...], gpus: int
) -> None:
    """Over the memory that such cards are sold with; sharding may checkpoint to save micro-steps of padded rows."""
    level, micro = len(LEVELS), 0
    for gib in sizes:
        gpu = lookup_gpu(card).model_copy(update={"memory_mib": gib * 1024})
        plan = plan_on(load(name), gpu, "Qwen/Qwen3-0.6B", gpus)
        if plan is None:
            assert micro == 0, "it fitted with less memory"
            continue
        assert plan.batch.micro_batch_size >= micro
        if plan.strategy in ("single", "ddp") or plan.batch.packed:
            assert LEVELS.index(plan.checkpointing) <= level
            level = LEVELS.index(plan.checkpointing)
        micro = plan.batch.micro_batch_size
    assert micro > 0


@pytest.mark.parametrize("name", MANIFESTS, ids=id_of)
@pytest.mark.parametrize("gpu", ["rtx4090", "h100"])
def test_more_gpus_never_mean_a_longer_estimate(name: str, gpu: str) -> None:
    """But for what it takes to reach them, where micro-steps are as short as they can be launched: a few hundredths."""
    last = float("inf")
    for gpus, nodes in ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (8, 2), (8, 4)):
        plan = plan_on(load(name), lookup_gpu(gpu), "Qwen/Qwen3-0.6B", gpus, nodes)
        assert plan is not None
        assert plan.speed.total_seconds is not None
        assert plan.speed.total_seconds <= last * 1.06, (gpus, nodes)
        last = plan.speed.total_seconds


def test_a_slow_link_is_named_when_it_is_the_limit() -> None:
    plan = plan_on(load("neo4j", full=True), lookup_gpu("rtx4090"), "Qwen/Qwen3-0.6B", gpus=8, nodes=4)
    assert plan is not None
    assert plan.speed.communication_fraction > 0.1


def test_the_4090_plan_uses_the_card() -> None:
    """The next size that divides the batch of 48 without a rest does not fit."""
    plan = plan_for(gpu="rtx4090")
    assert plan.batch.micro_batch_size == 8
    assert 17 <= bytes_to_gib(plan.memory.total_bytes) <= 22
    assert plan.checkpointing == "none"
    even = plan_for(gpu="rtx4090", config={"batch_size": 9, "gradient_accumulation_steps": 5})
    assert 19 <= bytes_to_gib(even.memory.total_bytes) <= 22


def test_the_named_cards_get_different_plans() -> None:
    plans = [
        plan_for(gpu="rtx4090"),
        plan_for(gpu="rtx5090"),
        plan_for(gpu="rtx4080super"),
        plan_for(gpu="t4"),
        plan_for(gpu="h100", gpus=8, nodes=2),
    ]
    assert len({(p.batch.micro_batch_size, p.batch.num_ranks, p.precision.compute_dtype) for p in plans}) == 5
    assert {p.batch.global_batch_size for p in plans} == {48}


def test_a_busy_card_is_planned_by_what_is_free() -> None:
    hardware = make_hardware(lookup_gpu("rtx4090"), gpus_per_node=1, nodes=1, free_vram_mib=12_000)
    plan = make_plan(load("neo4j"), hardware, base=shape("Qwen/Qwen3-0.6B"), rows=ROWS)
    whole = plan_for(gpu="rtx4090")
    assert plan.memory.total_bytes <= plan.memory.usable_bytes < 12_000 * 1024**2
    assert plan.batch.micro_batch_size < whole.batch.micro_batch_size


def test_oom_fallbacks_need_less_memory_and_keep_the_global_batch() -> None:
    plan = plan_for(gpu="rtx4090", gpus=4)
    sizes = [plan.memory.total_bytes, *(fallback.predicted_bytes for fallback in plan.oom_fallbacks)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    for fallback in plan.oom_fallbacks:
        slots = fallback.micro_batch_size * fallback.gradient_accumulation_steps * plan.batch.num_ranks
        assert slots >= plan.batch.global_batch_size
    actions = [fallback.action for fallback in plan.oom_fallbacks]
    assert actions[0] == f"micro-batch {plan.batch.micro_batch_size // 2}"
    assert actions.index("gradient checkpointing: selective") < actions.index("gradient checkpointing: full")
    assert actions[-1] == "FSDP2"
    alone = [fallback.action for fallback in plan_for(gpu="rtx4090", base="Qwen/Qwen3-4B").oom_fallbacks]
    assert alone[-1] == "DeepSpeed ZeRO-3 with optimizer and parameters on the CPU"


def test_checkpointing_that_the_manifest_fixes_stays() -> None:
    always = plan_for(config={"gradient_checkpointing": True})
    assert always.checkpointing == "full"
    assert "not needed: everything fits without it" in decision(always, "gradient checkpointing")
    assert plan_for(config={"gradient_checkpointing": "selective"}).checkpointing == "selective"
    tight = plan_for(gpu="rtx4090", base="Qwen/Qwen3-8B")
    assert tight.checkpointing != "none"
    assert "would be needed" in decision(tight, "gradient checkpointing")
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(gpu="rtx4090", base="Qwen/Qwen3-8B", config={"gradient_checkpointing": False, "offload": "none"})
    assert "gradient_checkpointing true fits" in caught.value.hint


def test_what_cannot_fit_is_refused_with_the_ways_out() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(gpu="rtx4090", base="Qwen/Qwen3-14B", config={"offload": "none"})
    error = caught.value
    assert error.exit_code == ExitCode.DOES_NOT_FIT
    assert "Qwen/Qwen3-14B does not fit: it needs at least" in error.title
    assert {"weights", "activations", "context"} <= {problem.where for problem in error.problems}
    assert "base_models[0].quantization int4 fits" in error.hint
    assert "--gpus 2 fits (sharded)" in error.hint
    assert "--gpu a100-40gb fits (40.0 GiB)" in error.hint


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"strategy": "ddp"},
        {"strategy": "zero3"},
        {"offload": "none"},
        {"precision": "fp8"},
        {"precision": "fp32"},
        {"optim": "adamw_bnb_8bit"},
        {"init_lora_weights": "pissa_niter_4"},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_each_suggestion_fits_with_all_other_settings(config: dict[str, object], gpus: int) -> None:
    request: dict[str, Any] = {
        "gpu": "rtx4090",
        "gpus": gpus,
        "base": "Qwen/Qwen3-32B",
        "ram_gib_per_node": 24.0,
        "config": config,
    }
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(**request)
    names = {"ram": "ram_gib_per_node", "gpu": "gpu", "gpus": "gpus", "nodes": "nodes"}
    for suggestion in caught.value.hint.split("; "):
        changes: dict[str, Any] = {
            names[flag]: int(value) if value.isdigit() else value
            for flag, value in re.findall(r"--(\w+) (\S+)", suggestion)
        }
        if "int4" in suggestion:
            changes["overrides"] = ("base_models.0.quantization=int4",)
        if key := re.match(
            r"(max_seq_length|strategy|offload|precision|optim|init_lora_weights|\w+_to_save) (\S+) fits", suggestion
        ):
            value = json.loads(key[2]) if key[2][0].isdigit() or key[2] in ("null", "[]") else key[2]
            changes["config"] = config | {key[1]: value}
        assert changes, suggestion
        plan_for(**request | changes)


@pytest.mark.parametrize(
    ("request_", "suggestion"),
    [
        ({"gpus": 8, "strategy": "ddp"}, "without --strategy it fits"),
        ({"gpus": 8, "config": {"strategy": "zero1"}}, "strategy auto fits"),
        ({"gpus": 8, "config": {"optim": "adamw_bnb_8bit"}}, "optim adamw_torch_fused fits"),
        ({"gpus": 8, "config": {"init_lora_weights": "pissa_niter_4"}}, "init_lora_weights null fits"),
        ({"ram_gib_per_node": 512.0, "config": {"offload": "none"}}, "offload auto fits"),
    ],
    ids=str,
)
def test_setting_that_prevents_sharding_or_offloading_is_named(request_: dict[str, Any], suggestion: str) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(gpu="h100", base="meta-llama/Llama-3.1-70B", **request_)
    assert suggestion in caught.value.hint


def test_attention_and_compilation_are_named_if_another_value_fits() -> None:
    with pytest.raises(DoesNotFitError, match=r"attention auto fits"):
        plan_for(config={"attention": "eager", "max_seq_length": 32768})
    dora = {"adapter_type": "dora", "max_seq_length": 16384, "gradient_checkpointing": None, "torch_compile": None}
    with pytest.raises(DoesNotFitError, match=r"torch_compile true fits"):
        plan_for(gpu="rtx3070tilaptop", base="Qwen/Qwen3-1.7B", config=dora)
    plan_for(gpu="rtx3070tilaptop", base="Qwen/Qwen3-1.7B", config={**dora, "torch_compile": True})


def test_vram_limit_is_named_and_not_applied_to_suggested_gpus() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(gpu="h100", base="Qwen/Qwen3-8B", vram_limit_mib=6144, config={"offload": "none"})
    assert "without --vram-limit it fits (79.6 GiB)" in caught.value.hint
    assert "--gpu a4500 without --vram-limit fits (20.0 GiB)" in caught.value.hint
    plan_for(gpu="a4500", base="Qwen/Qwen3-8B", config={"offload": "none"})


def test_a_suggested_gpu_has_the_cpu_memory_that_is_assumed_for_it() -> None:
    """An L20 has that of a server, an RTX A2000 that of a desktop: too little to offload 4B parameters."""
    request: dict[str, Any] = {"base": "Qwen/Qwen3-4B", "overrides": FULL_FINE_TUNING}
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(gpu="l20", vram_limit_mib=4096, **request)
    (gpu,) = re.findall(r"--gpu (\S+) without --vram-limit fits", caught.value.hint)
    plan_for(gpu=gpu, **request)


def test_short_sequences_are_not_recomputed_if_fewer_fit_without_and_are_faster() -> None:
    planned: dict[str, Any] = {"gpu": "a1000", "base": "google/gemma-2-2b"}
    config = {"max_seq_length": 512, "gradient_checkpointing": None}
    free, fixed = (plan_for(**planned, config={**config, "gradient_checkpointing": level}) for level in (None, False))
    assert (free.checkpointing, free.batch.micro_batch_size) == ("none", 1)
    assert free.speed.tokens_per_second == fixed.speed.tokens_per_second


def test_int4_is_suggested_with_what_it_needs_besides() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(gpu="rtx4090", base="Qwen/Qwen3-32B", ram_gib_per_node=24.0)
    assert "base_models[0].quantization int4 fits, with the optimizer in CPU memory" in caught.value.hint
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(gpu="rtx4090", base="Qwen/Qwen3-32B", config={"offload": "none"})
    assert "int4" not in caught.value.hint


def test_largest_sizes_of_a_config_do_not_fit(tmp_path: Path) -> None:
    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings")
    config = {"model_type": "llama", "num_attention_heads": 32, **dict.fromkeys(sizes, 2**31)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DoesNotFitError, match="does not fit"):
        plan_for(base=str(tmp_path))


def test_cpu_memory_is_a_limit_too() -> None:
    with pytest.raises(DoesNotFitError, match=r"offloading needs .* of CPU memory per node"):
        plan_for(gpu="rtx4090", base="meta-llama/Llama-3.1-70B", ram_gib_per_node=64.0)


def test_sequences_longer_than_the_base_are_refused() -> None:
    with pytest.raises(ManifestError, match=r"max_seq_length: 65536 exceeds the 40960 positions of Qwen/Qwen3-0.6B"):
        plan_for(config={"max_seq_length": 65536})


def test_targets_that_the_base_does_not_have() -> None:
    with pytest.raises(ManifestError) as caught:
        plan_for(config={"target_modules": ["q_prj", "qkv_proj"]})
    assert "training.config.target_modules: Qwen/Qwen3-0.6B has no q_prj; did you mean q_proj?" in str(caught.value)
    assert "its linear layers: q_proj, k_proj" in caught.value.hint


def test_many_unknown_target_modules_are_refused_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr("launcher.plan.adapter.find_closest", lambda name, _known: searched.append(name))
    names = [f"m{number}" for number in range(100_000)]
    with pytest.raises(ManifestError, match="does not have all target modules"):
        plan_for(config={"target_modules": names})
    assert len(searched) == 50


def test_more_spare_memory_than_the_whole_card_is_never_claimed() -> None:
    memory = plan_for(gpu="h200").memory
    assert memory.device_bytes > 139 * GIB
    assert 0 < memory.headroom_bytes < 0.1 * memory.device_bytes


def test_busy_gpu_is_distinguished_from_a_small_one() -> None:
    hardware = make_hardware(lookup_gpu("rtx4090"), gpus_per_node=1, nodes=1, free_vram_mib=100)
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(load("neo4j"), hardware, base=shape("Qwen/Qwen3-0.6B"), rows=ROWS)
    assert "0 MiB of 24.0 GiB are usable (23.9 GiB in use by other processes)" in caught.value.title
    assert caught.value.hint.startswith("it fits once the other processes have ended")


def test_ways_out_of_a_quantised_and_of_a_full_fine_tuning() -> None:
    with pytest.raises(DoesNotFitError) as full:
        plan_for(gpu="a100", base="Qwen/Qwen2.5-72B", overrides=FULL_FINE_TUNING)
    lora = "adapter_type lora, rank 16, alpha 32, target_modules all-linear with base_models[0].quantization int4 fits"
    assert lora in full.value.hint
    assert "--gpus 8 --nodes 2 fits (sharded)" in full.value.hint or "--gpus 8 --nodes 4 fits" in full.value.hint


def map_config(config: dict[str, Any]) -> Iterator[str]:
    return (f"training.config.{key}={json.dumps(value)}" for key, value in config.items())


@pytest.mark.parametrize(
    "request_",
    [
        {"gpu": "rtx3060", "base": "Qwen/Qwen3-4B"},
        {"gpu": "rtx5060ti-8gb", "base": "microsoft/Phi-3.5-mini-instruct"},  # has other linear layers
        {"gpu": "rtx3060", "base": "Qwen/Qwen3-4B", "config": {"bf16_stochastic_round": True}},
        {"gpu": "rtx3060", "base": "Qwen/Qwen3-4B", "strategy": "zero1"},
    ],
    ids=str,
)
def test_suggestions_of_full_fine_tuning_can_be_followed(request_: dict[str, Any]) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(**request_, overrides=FULL_FINE_TUNING)
    followed = []
    for suggestion in caught.value.hint.split("; "):
        if not suggestion.startswith(("adapter_type", "bf16_stochastic_round")):
            continue
        kept, _, removed = re.sub(r" fits.*", "", suggestion).partition(", without ")
        kept, _, batch = kept.partition(" and a global batch of ")
        changes = dict(part.split(" ", 1) for part in re.split(r", | with ", kept))
        more = {"batch_size": batch, "gradient_accumulation_steps": "1"} if batch else {}
        more |= dict.fromkeys(filter(None, removed.split(" and ")), "null")
        keys = {key if "[" in key else f"training.config.{key}": value for key, value in (changes | more).items()}
        kept_config = {key: value for key, value in request_.get("config", {}).items() if key not in more}
        overrides = (*FULL_FINE_TUNING, *(f"{key}={value}" for key, value in keys.items()))
        plan_for(**request_ | {"config": {}}, overrides=(*map_config(kept_config), *overrides))
        followed.append(suggestion)
    assert any(suggestion.startswith("adapter_type lora") for suggestion in followed)
    is_alone = "strategy" not in request_
    assert is_alone or not any(suggestion.startswith("bf16") for suggestion in followed)


def test_more_cpu_memory_is_a_way_out_of_too_little() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(gpu="rtx4090", base="meta-llama/Llama-3.1-70B", ram_gib_per_node=64.0)
    wanted = int(caught.value.hint.split("--ram ")[1].split(" ")[0])
    assert plan_for(gpu="rtx4090", base="meta-llama/Llama-3.1-70B", ram_gib_per_node=wanted + 1.0).offload != "none"


def test_oom_fallbacks_fit_in_cpu_memory() -> None:
    fallbacks = plan_for(
        gpu="a100", base="Qwen/Qwen3-8B", overrides=FULL_FINE_TUNING, ram_gib_per_node=190.0
    ).oom_fallbacks
    assert "DeepSpeed ZeRO-3 with optimizer and parameters on the CPU" not in [
        fallback.action for fallback in fallbacks
    ]


def test_gathered_weights_justify_recomputation() -> None:
    """Llama 70B on eight 4090s: every micro-step gathers all weights, so micro-batches are as large as they can be."""
    plan = plan_for(
        gpu="rtx4090", gpus=8, base="meta-llama/Llama-3.1-70B", overrides=("base_models.0.quantization=int4",)
    )
    assert plan.strategy == "fsdp2"
    assert plan.batch.micro_batch_size > 1


def test_idle_gpus_and_slow_links_are_reported() -> None:
    idle = plan_for(gpu="h100", gpus=8, nodes=16)
    assert "80 of 128 GPUs are idle: a step has only 48 sequences" in idle.notes
    slow = plan_for(gpu="rtx4090", gpus=8, nodes=2, overrides=FULL_FINE_TUNING)
    assert "would be faster" in slow.speed.fewer_gpus_note
    assert slow.speed.fewer_gpus_note in slow.notes


def test_micro_batches_that_do_not_divide_are_not_blamed_on_the_ranks() -> None:
    config = {"batch_size": 11, "gradient_accumulation_steps": 1, "torch_compile_mode": "default"}
    plan = plan_for(gpu="rtx4090", config=config)
    assert (plan.batch.empty_slots, plan.batch.nearest_even_batches) == (1, ())
    assert "micro-batches that divide the batch evenly would be slower" in decision(plan, "batch split")


def test_a_huge_batch_is_planned_at_once() -> None:
    plan = plan_for(gpu="b200", base="launcher/tiny", config={"batch_size": 1_000_000, "max_seq_length": 8})
    assert plan.batch.num_slots - plan.batch.empty_slots == 3_000_000


def test_doras_dropout_multiplies_by_the_base_twice_and_the_plan_says_so() -> None:
    plain, dropping = (plan_for(gpu="h200", config={"adapter_type": "dora", "dropout": rate}) for rate in (0.0, 0.1))
    assert "twice" not in decision(plain, "adapter dropout")
    assert "with dropout, DoRA needs a second matmul per adapted matrix" in decision(dropping, "adapter dropout")
    fast, slow = (plan.speed.tokens_per_second for plan in (plain, dropping) if plan.speed is not None)
    assert fast is not None
    assert slow is not None
    assert 1.2 < fast / slow < 2.2


def test_large_quantized_base_gets_a_larger_micro_batch_with_checkpointing() -> None:
    """Its weights are dequantized in every micro-step; other bases keep the small micro-batch."""
    int4 = plan_for(gpu="l40s", base="Qwen/Qwen3-32B", overrides=("base_models.0.quantization=int4",))
    assert (int4.checkpointing, int4.strategy) == ("full", "single")
    assert int4.batch.micro_batch_size > 1
    bf16 = plan_for(gpu="rtx3090", base="Qwen/Qwen3-8B")
    assert (bf16.checkpointing, bf16.batch.micro_batch_size) == ("full", 1)


def test_reason_of_uncompiled_mixtures_of_experts_names_the_key_that_compiles_them() -> None:
    base, targets = "Qwen/Qwen3-30B-A3B", {"target_modules": "all-linear"}
    usual = plan_for(gpu="h200", base=base, config={**targets, "torch_compile": None})
    assert "torch_compile: true requests it" in decision(usual, "torch.compile")
    assert plan_for(gpu="h200", base=base, config={**targets, "torch_compile": True}).compile is not None
