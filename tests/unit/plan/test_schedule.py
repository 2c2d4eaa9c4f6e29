"""Steps, warm-up, cadence, workers and compile: what follows from how much data there is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.core.choices import SHARDED_STRATEGIES
from launcher.plan import Plan
from launcher.plan.estimator_inputs import estimate_plan_memory
from launcher.plan.oom_fallbacks import apply_next_fallback
from tests.conftest import WriteManifest
from tests.unit.plan.conftest import FULL_FINE_TUNING, decision, plan_for


def plan_with_rows(write_manifest: WriteManifest, count: int, **more: object) -> Plan:
    path = write_manifest({"training.dataset.path": "train.jsonl", "training.dataset.format": "jsonl"})
    row = json.dumps({"question": "x" * 700, "schema": "s", "cypher": "c"})
    (path.parent / "train.jsonl").write_text(f"{row}\n" * count)
    return plan_for(str(path), **more)  # type: ignore[arg-type]


def test_stated_rows_give_steps() -> None:
    plan = plan_for()
    packs = 35_946 * 350 / (2048 * 0.998)
    assert plan.schedule.num_steps == pytest.approx(2 * packs / 48, abs=2)
    assert plan.schedule.num_steps is not None
    assert plan.schedule.warmup_steps == pytest.approx(0.03 * plan.schedule.num_steps, abs=1)
    assert "35,946 rows" in decision(plan, "training length")


def test_rows_that_are_not_packed_are_one_sequence_each() -> None:
    assert plan_for(config={"packing": False, "epochs": 1}).schedule.num_steps == -(-35_946 // 48)


def test_25_rows_need_neither_compile_nor_workers(write_manifest: WriteManifest) -> None:
    plan = plan_with_rows(write_manifest, 25)
    assert plan.compile is None
    assert "in this run, but compiling takes" in decision(plan, "torch.compile")
    assert plan.loader.num_workers == 0
    assert plan.loader.prefetch_factor is None
    assert not plan.loader.persistent_workers
    assert "steps are over before a worker has started" in decision(plan, "dataloader workers")


def test_many_rows_pay_for_both(write_manifest: WriteManifest) -> None:
    plan = plan_with_rows(write_manifest, 40_000)
    assert plan.compile is not None
    assert plan.compile.scope == "layer"
    assert plan.loader.num_workers == 2
    assert plan.loader.persistent_workers
    assert "read from train.jsonl" in plan.data.basis


def test_an_unknown_number_of_rows_is_no_guess(write_manifest: WriteManifest) -> None:
    path = write_manifest(drop=("training.dataset.splits",))
    plan = plan_for(str(path))
    assert (plan.schedule.num_steps, plan.schedule.warmup_steps, plan.speed.total_seconds) == (None, None, None)
    assert plan.speed.tokens_per_second is not None
    assert plan.compile is not None


def test_max_steps_shortens_the_run() -> None:
    plan = plan_for(max_steps=10)
    assert (plan.schedule.num_steps, plan.schedule.max_steps, plan.schedule.warmup_steps) == (10, 10, 1)


def test_a_ratio_wins_over_steps_as_it_did(write_manifest: WriteManifest) -> None:
    path = write_manifest({"training.config.warmup_steps": 500, "training.config.warmup_ratio": 0.1})
    plan = plan_for(str(path), max_steps=100)
    assert plan.schedule.warmup_steps == 10
    plan = plan_for(config={"warmup_steps": 7, "warmup_ratio": None})
    assert plan.schedule.warmup_steps == 7


@pytest.mark.parametrize(
    ("config", "steps", "epochs"),
    [
        ({"save_strategy": "steps", "save_steps": 250}, 250, None),
        ({"save_strategy": "steps"}, 500, None),
        ({"save_strategy": "epoch"}, None, 1.0),
        ({"save_strategy": "no"}, None, None),
        ({"save_strategy": None, "save_steps": 250}, 250, None),
        ({"save_strategy": None, "save_epochs": 0.5}, None, 0.5),
    ],
)
def test_saving_as_the_manifest_says(config: dict[str, object], steps: int | None, epochs: float | None) -> None:
    schedule = plan_for(config={**config, "load_best_model_at_end": False}).schedule
    assert (schedule.save_every_steps, schedule.save_every_epochs) == (steps, epochs)


def test_constant_schedule_has_no_warmup_as_in_training(write_manifest: WriteManifest) -> None:
    constant = {"training.config.lr_scheduler": "constant", "training.config.warmup_steps": 9}
    plan = plan_for(str(write_manifest(constant)))
    assert (plan.schedule.warmup_steps, plan.schedule.warmup_ratio) == (0, None)
    said = decision(plan, "learning rate")
    assert "constant, 0 steps of warm-up" in said
    assert "constant has no warm-up, constant_with_warmup has one" in said
    notes = plan_for(str(write_manifest(constant, drop=("training.config.warmup_ratio",))), max_steps=5).notes
    assert not [note for note in notes if "warm-up" in note]


def test_a_crash_loses_at_most_half_an_hour(write_manifest: WriteManifest) -> None:
    path = write_manifest({"training.dataset.splits": {"train": 5_000_000}}, drop=("training.config.save_strategy",))
    plan = plan_for(str(path))
    assert plan.schedule.save_every_steps is not None
    assert plan.speed.seconds_per_step is not None
    assert plan.schedule.save_every_steps * plan.speed.seconds_per_step <= 1800
    assert "a crash then costs at most half an hour" in decision(plan, "checkpoints")
    short = plan_for(str(write_manifest(drop=("training.config.save_strategy",))))
    assert short.schedule.save_every_epochs == 1.0


def test_how_often_metrics_are_written(write_manifest: WriteManifest) -> None:
    assert decision(plan_for(), "logging") == "every 10 steps | logging_steps in the manifest"
    left_out = plan_for(str(write_manifest(drop=("training.config.logging_steps",))))
    assert decision(left_out, "logging") == "every 10 steps | default of the manifest format"


def test_workers_never_take_the_last_core() -> None:
    assert plan_for(cpu_cores_per_node=1).loader.num_workers == 0
    assert plan_for(cpu_cores_per_node=2).loader.num_workers == 1
    assert plan_for(gpu="h100", gpus=8, cpu_cores_per_node=8).loader.num_workers == 0
    assert plan_for(config={"packing": False}, cpu_cores_per_node=16).loader.num_workers == 2


def test_loader_keys_of_the_manifest_are_honoured() -> None:
    loader = plan_for(
        config={
            "dataloader_num_workers": 3,
            "dataloader_prefetch_factor": 7,
            "dataloader_pin_memory": False,
            "dataloader_persistent_workers": False,
        }
    ).loader
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.persistent_workers) == (
        3,
        7,
        False,
        False,
    )


def test_compile_keys_of_the_manifest_are_honoured() -> None:
    config = {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_mode": "max-autotune"}
    compiled = plan_for(config=config).compile
    assert compiled is not None
    assert (compiled.backend, compiled.mode) == ("eager", "max-autotune-no-cudagraphs")
    assert plan_for(config={"torch_compile": False}).compile is None


def test_torch_never_captures_graphs_of_its_own() -> None:
    """Measured on an H200: "accessing tensor output of CUDAGraphs that has been overwritten"."""
    plan = plan_for(config={"torch_compile": True, "torch_compile_mode": "reduce-overhead"})
    assert plan.compile is not None
    assert plan.compile.mode is None
    assert "see CUDA graph" in decision(plan, "compile scope")


SMALL = {"batch_size": 2, "gradient_accumulation_steps": 1}


def test_short_micro_steps_are_one_cuda_graph() -> None:
    plan = plan_for(gpu="h200", config=SMALL)
    assert plan.cuda_graph
    assert "kernel launches would limit them" in decision(plan, "CUDA graph")
    assert plan.compile is None or plan.compile.scope == "layer"


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        ({"attention": "flex"}, {}, "attention by flex has different shapes in every micro-batch"),
        ({"packing": False}, {}, "without packing, shapes vary"),
        ({}, {"gpus": 2, "strategy": "fsdp2"}, "fsdp2 communicates between kernels"),
    ],
)
def test_settings_that_rule_out_a_cuda_graph(config: dict[str, object], options: dict[str, Any], why: str) -> None:
    """A requested graph is refused with a reason; otherwise it is left out silently."""
    plan = plan_for(gpu="h200", config=SMALL | config | {"torch_compile_mode": "reduce-overhead"}, **options)
    assert not plan.cuda_graph
    assert why in decision(plan, "CUDA graph")
    quiet = plan_for(gpu="h200", config=SMALL | config, **options)
    assert not quiet.cuda_graph
    assert "CUDA graph" not in {choice.name for choice in quiet.decisions}


@pytest.mark.parametrize(("adapter", "replays"), [("lora", True), ("dora", True), ("full", False)])
def test_replicas_replay_where_their_gradients_are_few(adapter: str, replays: bool) -> None:
    """All of a base's travel while others are computed."""
    overrides = FULL_FINE_TUNING if adapter == "full" else (f"training.config.adapter_type={adapter}",)
    config = {"torch_compile_mode": "reduce-overhead"}
    plan = plan_for(gpu="h200", gpus=2, config=config, overrides=overrides, strategy="ddp")
    assert (plan.strategy, plan.cuda_graph, plan.defer_gradient_sync) == ("ddp", replays, replays)
    wanted = "one graph" if replays else "ddp communicates between kernels"
    assert wanted in decision(plan, "CUDA graph")
    if replays:  # without DDP's buckets
        gradients = {term.name: term.num_bytes for term in plan.memory.terms}["gradients"]
        assert gradients == 4 * plan.adapter.trainable_parameters


def test_speed_counts_on_a_graph_only_where_there_is_one() -> None:
    graphed, launched = (plan_for(gpu="h200", config=SMALL | more) for more in ({}, {"attention": "flex"}))
    assert (graphed.cuda_graph, launched.cuda_graph) == (True, False)
    assert graphed.speed.tokens_per_second is not None
    assert launched.speed.tokens_per_second is not None
    assert launched.speed.tokens_per_second < 0.5 * graphed.speed.tokens_per_second


def test_cuda_graph_holds_gradients_and_activations_together() -> None:
    """With one launched micro-batch per step, gradients grow while activations are freed."""
    graphed, launched = (
        plan_for(gpu="h200", config=SMALL | {"torch_compile_mode": mode}) for mode in (None, "default")
    )
    sizes = [{term.name: term.num_bytes for term in plan.memory.terms}["gradients"] for plan in (graphed, launched)]
    assert sizes == [4 * graphed.adapter.trainable_parameters, 0]
    assert estimate_plan_memory(graphed).total_bytes == graphed.memory.total_bytes


def test_fallbacks_to_several_processes_drop_the_cuda_graph() -> None:
    plan: Plan | None = plan_for(gpu="rtx4090")
    seen = set()
    while plan is not None:
        seen.add((plan.strategy == "single", plan.cuda_graph))
        assert not plan.defer_gradient_sync
        plan = apply_next_fallback(plan)
    assert (True, True) in seen
    assert (False, True) not in seen
    assert (False, False) in seen


def test_fallbacks_that_checkpoint_or_shard_compile_by_layer() -> None:
    plan: Plan | None = plan_for(
        gpu="h100", gpus=8, config={"max_seq_length": 512, "epochs": 40, "torch_compile_mode": "default"}
    )
    assert plan is not None
    assert plan.compile is not None
    assert plan.compile.scope == "model"
    lower = [plan]
    while (plan := apply_next_fallback(plan)) is not None:
        lower.append(plan)
    scopes = {
        (one.checkpointing != "none" or one.strategy in SHARDED_STRATEGIES, one.compile.scope)
        for one in lower
        if one.compile is not None
    }
    assert scopes == {(False, "model"), (True, "layer")}


def test_a_graph_leaves_room_for_evaluations() -> None:
    """What it records in stays its own."""
    full = plan_for(gpu="h200", config={"batch_size": 57, "gradient_accumulation_steps": 1})
    assert full.memory.total_bytes > 0.85 * full.memory.device_bytes
    assert not full.cuda_graph
    assert plan_for(gpu="rtx4090", config={"batch_size": 4, "gradient_accumulation_steps": 4}).cuda_graph


def test_without_a_graph_short_micro_steps_are_compiled_whole_where_the_run_is_long() -> None:
    config = SMALL | {"torch_compile_mode": "default"}
    plan = plan_for(gpu="h200", config=config | {"max_steps": 100_000})
    assert plan.compile is not None
    assert not plan.cuda_graph
    assert plan.compile.scope == "model"
    assert "kernel launches limit them" in decision(plan, "compile scope")
    short = plan_for(gpu="h200", config=config | {"max_steps": 1000})
    assert short.compile is not None
    assert short.compile.scope == "layer"
    assert "takes 3 min to compile and saves 18 s" in decision(short, "compile scope")


def test_cost_is_price_times_gpus_times_hours() -> None:
    plan = plan_for(gpu="h100", gpus=8, price_per_gpu_hour=2.5)
    assert plan.speed.total_seconds is not None
    assert plan.speed.cost == pytest.approx(2.5 * 8 * plan.speed.total_seconds / 3600)
    assert plan_for().speed.cost is None
    node = plan_for(gpu="h100", gpus=8, price_per_node_hour=20.0, currency="EUR").speed
    assert node.cost == plan.speed.cost
    assert (node.price_per_gpu_hour, node.format_price()) == (2.5, "20 EUR per node-hour")
    assert plan.speed.format_price() == "2.5 per GPU-hour"


def test_how_sure_it_is() -> None:
    assert "similar runs were measured on this GPU" in plan_for(gpu="h200").speed.confidence
    assert "not measured: this GPU (scaled from an H200" in plan_for(gpu="rtx4090").speed.confidence
    assert "links between GPUs" in plan_for(gpu="h100", gpus=2).speed.confidence
    published = {"dropout": 0.1, "gradient_checkpointing": True, "torch_compile": False, "adapter_type": "dora"}
    assert "similar runs were measured on this GPU" in plan_for(gpu="h200", config=published).speed.confidence
    other = {"adapter_type": "ia3", "rank": None, "alpha": None}
    assert "not measured: IA3;" in plan_for(gpu="h200", config=other).speed.confidence
    assert "FP16" in plan_for(gpu="v100-32gb").speed.confidence
    for compiled, covered in ((True, "with compilation, without other start-up"), (False, "; without start-up")):
        confidence = plan_for(gpu="h200", config={"torch_compile": compiled}).speed.confidence
        assert f"{covered}, evaluation and checkpoints" in confidence
    assert plan_for(gpu=None).speed.tokens_per_second is None


def test_the_smoke_profile_trains_the_tiny_base_on_the_sample() -> None:
    plan = plan_for(gpu=None)
    assert (plan.profile, plan.base.name) == ("smoke", "launcher/tiny")
    assert plan.data.path == "sample/train.jsonl"
    assert "no GPU here" in decision(plan, "profile")
    assert plan_for(gpu="rtx4090", profile="smoke").base.name == "launcher/tiny"
    assert plan_for(gpu=None, profile="full").base.name == "Qwen/Qwen3-0.6B"


def test_saving_and_evaluating_every_so_many_epochs() -> None:
    plan = plan_for(config={"save_strategy": "epoch", "save_epochs": 2, "eval_epochs": 0.5})
    assert (plan.schedule.save_every_epochs, plan.schedule.evaluate_every_epochs) == (2.0, 0.5)
    assert decision(plan, "checkpoints").startswith("every 2 epochs")
    assert decision(plan, "evaluation").startswith("every 0.5 epochs")


def test_epoch_smaller_than_the_global_batch_is_planned_as_it_is(write_manifest: WriteManifest) -> None:
    config = {"batch_size": 256, "gradient_accumulation_steps": 2, "max_seq_length": 4096, "epochs": 5}
    plan = plan_with_rows(write_manifest, 400, config=config)  # about 20 sequences
    full = plan_with_rows(write_manifest, 400 * 24, config=config)
    (note,) = (note for note in plan.notes if "larger than an epoch" in note)
    assert "the global batch of 512 sequences is larger than an epoch, which has about 20" in note
    assert "so the global batch is about 20; 5 steps hardly train the model: --set training.config.batch_size=1" in note
    assert decision(plan, "global batch").startswith("20 sequences of 4,096 tokens")
    assert "an epoch has no more sequences" in decision(plan, "global batch")
    assert "as many as an epoch needs" in decision(plan, "batch split")
    micro_steps = int(decision(plan, "batch split").split(" x ")[1].split()[0])
    assert micro_steps == -(-20 // plan.batch.micro_batch_size) < plan.batch.gradient_accumulation_steps
    assert plan.batch.global_batch_size == 512
    assert plan.compile is None
    assert plan.speed.seconds_per_step is not None
    assert full.speed.seconds_per_step is not None
    assert plan.speed.seconds_per_step < full.speed.seconds_per_step / 10
    assert plan.speed.total_seconds == pytest.approx(5 * plan.speed.seconds_per_step)


def test_micro_batch_is_not_larger_than_an_epoch(write_manifest: WriteManifest) -> None:
    plan = plan_with_rows(write_manifest, 21, config={"batch_size": 4096, "max_seq_length": 512, "epochs": 5})
    sequences = int(decision(plan, "global batch").split()[0])
    assert 5 < sequences < 16
    assert decision(plan, "batch split").startswith(f"micro-batch {sequences} x 1 accumulation step x 1 rank")
    assert "0 of" in decision(plan, "batch split")


@pytest.mark.parametrize(("rows", "has_note", "fullness"), [(47, True, 1.0), (48, False, 1.0), (72, False, 0.75)])
def test_batch_of_one_epoch_and_partial_steps(
    write_manifest: WriteManifest, rows: int, has_note: bool, fullness: float
) -> None:
    config = {"packing": False, "batch_size": 48, "gradient_accumulation_steps": 1, "torch_compile": False}
    plan = plan_with_rows(write_manifest, rows, config=config)
    assert any("larger than an epoch" in note for note in plan.notes) == has_note
    assert plan.speed.total_seconds is not None
    assert plan.speed.seconds_per_step is not None
    assert plan.schedule.num_steps is not None
    assert plan.speed.total_seconds == pytest.approx(plan.schedule.num_steps * plan.speed.seconds_per_step * fullness)


def test_one_row_leaves_all_gpus_but_one_idle(write_manifest: WriteManifest) -> None:
    plan = plan_with_rows(write_manifest, 1, gpus=8)
    assert "7 of 8 GPUs are idle: a step has only 1 sequence" in plan.notes


def test_one_step_is_singular() -> None:
    config = {"warmup_steps": 1, "warmup_ratio": None, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1}
    config["load_best_model_at_end"] = False
    plan = plan_for(config=config, max_steps=20)
    assert "1 step of warm-up" in decision(plan, "learning rate")
    assert decision(plan, "logging").startswith("every step |")
    assert decision(plan, "checkpoints").startswith("every step;")


def test_assumed_cpu_memory_is_marked() -> None:
    full = {"adapter_type": "full"}
    assert "(of 64 GiB, assumed; --ram sets them)" in decision(plan_for(config=full), "checkpoint writing")
    assert "assumed" not in decision(plan_for(config=full, ram_gib_per_node=64), "checkpoint writing")
