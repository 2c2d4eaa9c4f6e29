"""The smoke profile's own sizes: two cores need a few minutes, and the command line has the last word."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.core.errors import ManifestError
from launcher.manifest import find_manifest, load_manifest, manifest_sha256
from launcher.plan import Plan
from launcher.plan.smoke import make_smoke_sizes
from launcher.request.request import Request, plan_request
from tests.conftest import WriteManifest
from tests.unit.plan.conftest import decision, plan_for

pytestmark = pytest.mark.long

SIZED = ("global batch", "training length", "learning rate", "checkpoints", "evaluation", "logging")


def smoke(expert: str = "neo4j", **more: Any) -> Plan:
    return plan_for(expert, gpu=None, profile="smoke", **more)


def sizes_of(plan: Plan) -> dict[str, Any]:
    schedule = plan.schedule
    return {
        "batch": (plan.batch.global_batch_size, plan.batch.sequence_length),
        "steps": schedule.num_steps,
        "rate": plan.optimizer.learning_rate,
        "warmup": schedule.warmup_steps,
        "evaluation": (schedule.evaluate_every_steps, schedule.evaluate_every_epochs),
        "saving": (schedule.save_every_steps, schedule.save_every_epochs),
        "logging": schedule.logging_steps,
    }


SIZES = {
    "batch": (8, 512),
    "steps": 60,
    "rate": 1e-3,
    "warmup": 5,
    "evaluation": (20, None),
    "saving": (20, None),
    "logging": 5,
}


@pytest.mark.parametrize("expert", ["json", "neo4j", "sql", "typescript"])
def test_sizes_that_two_cores_can_do(expert: str) -> None:
    assert sizes_of(smoke(expert)) == SIZES


def test_sizes_are_the_profiles_on_any_hardware() -> None:
    assert sizes_of(plan_for(gpu="h100", profile="smoke")) == SIZES


def test_the_rest_stays_the_manifests() -> None:
    config = {"lr_scheduler": "linear", "weight_decay": 0.1, "seed": 7, "max_grad_norm": 0.5, "packing": False}
    plan = smoke(config=config)
    assert (plan.schedule.lr_scheduler, plan.schedule.seed, plan.schedule.save_total_limit) == ("linear", 7, 3)
    assert (plan.optimizer.weight_decay, plan.optimizer.max_grad_norm) == (0.1, 0.5)
    assert (plan.batch.packed, plan.loss_on, plan.schedule.load_best_model_at_end) == (False, "completion", True)
    full = plan_for(gpu=None, profile="full")
    assert (plan.adapter.kind, plan.adapter.rank, plan.adapter.alpha) == ("lora", full.adapter.rank, full.adapter.alpha)


def test_replaced_decisions_name_the_manifest_values() -> None:
    plan = smoke()
    said = {d.name: d for d in plan.decisions}
    assert [said[name].decided_by for name in SIZED] == ["plan"] * len(SIZED)
    assert [said[name].reason.partition(":")[0] for name in SIZED] == ["smoke profile"] * len(SIZED)
    assert [said[name].reason.partition("(manifest: ")[2].rstrip(")") for name in SIZED] == [
        "48 sequences of 2,048 tokens",
        "2 epochs",
        "0.0002, 0.03 of the steps of warm-up",
        "every epoch",
        "every epoch",
        "every 10 steps",
    ]
    assert "a few minutes on two CPU cores" in said["global batch"].reason
    assert said["global batch"].value == "8 sequences of 512 tokens, packed"


def test_reason_of_the_layers_names_the_cpu() -> None:
    assert decision(smoke(), "layers").endswith("fused blocks are slower on a CPU")
    assert "run as fused ops" in decision(plan_for(gpu="h100"), "layers")


def test_every_replaced_value_has_a_decision() -> None:
    config = load_manifest(find_manifest("neo4j")).manifest.training.config
    _, replaced = make_smoke_sizes(config, frozenset())
    assert set(replaced) == set(SIZED)
    assert set(replaced) <= {d.name for d in smoke().decisions}


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({"max_seq_length": 1024}, {"batch": (8, 1024)}),
        ({"batch_size": 4}, {"batch": (12, 512)}),
        ({"batch_size": 16, "gradient_accumulation_steps": 1}, {"batch": (16, 512)}),
        ({"max_steps": 500}, {"steps": 500}),
        ({"max_steps": 3}, {"steps": 3}),
        ({"learning_rate": 1e-4}, {"rate": 1e-4}),
        ({"warmup_steps": 9}, {"warmup": 9}),
        ({"warmup_ratio": 0.5}, {"warmup": 30}),
        ({"warmup_ratio": None}, {}),
        ({"eval_steps": 7}, {"evaluation": (7, None)}),
        ({"save_steps": 7}, {"saving": (7, None)}),
        ({"save_strategy": "epoch"}, {"saving": (None, 1.0), "evaluation": (None, 1.0)}),
        ({"save_epochs": 0.5}, {"saving": (None, 0.5), "evaluation": (None, 1.0)}),
        ({"eval_epochs": 0.5, "load_best_model_at_end": False}, {"evaluation": (None, 0.5)}),
        ({"save_strategy": "epoch", "load_best_model_at_end": False}, {"saving": (None, 1.0)}),
        ({"evaluation_strategy": "no", "load_best_model_at_end": False}, {"evaluation": (None, None)}),
        ({"save_strategy": "steps", "evaluation_strategy": "steps"}, {}),
        ({"logging_steps": 1}, {"logging": 1}),
        ({"weight_decay": 0.5}, {}),
    ],
    ids=str,
)
def test_command_line_wins_over_smoke_sizes(config: dict[str, Any], changed: dict[str, Any]) -> None:
    assert sizes_of(smoke(config=config)) == SIZES | changed


def test_max_steps_flag_wins() -> None:
    plan = smoke(max_steps=7)
    assert plan.schedule.num_steps == 7
    assert decision(plan, "training length") == "7 steps | --max-steps"


@pytest.mark.parametrize("changes", [{}, {"training.config.max_steps": 1000}])
def test_epochs_on_the_command_line_win(write_manifest: WriteManifest, changes: dict[str, Any]) -> None:
    """Over the manifest's steps too."""
    file = write_manifest({**changes, "training.dataset.path": "x"})
    plan = smoke(str(file), config={"epochs": 3})
    assert (plan.schedule.max_steps, plan.schedule.epochs) == (None, 3)


def test_no_steps_on_the_command_line_means_the_manifests_epochs() -> None:
    plan = smoke(config={"max_steps": None})
    assert (plan.schedule.max_steps, plan.schedule.epochs) == (None, 2)


def test_an_object_that_the_command_line_sets_gives_its_keys(write_manifest: WriteManifest) -> None:
    config = '{"method": "sft", "adapter_type": "full", "batch_size": 9, "epochs": 1, "learning_rate": 0.5}'
    plan = smoke(str(write_manifest()), overrides=(f"training.config={config}",))
    assert plan.batch.global_batch_size == 9
    assert (plan.schedule.max_steps, plan.optimizer.learning_rate) == (None, 0.5)
    assert plan.batch.sequence_length == 512


def test_only_replaced_values_are_reported() -> None:
    plan = smoke(config={"max_seq_length": 1024, "learning_rate": 1e-4, "logging_steps": 2})
    assert decision(plan, "global batch").endswith("(manifest: 48 sequences); --set training.config.max_seq_length")
    assert decision(plan, "learning rate").endswith(
        "(manifest: 0.03 of the steps of warm-up); --set training.config.learning_rate"
    )
    assert decision(plan, "logging") == "every 2 steps | --set training.config.logging_steps"
    short = smoke(config={"batch_size": 4})
    assert decision(short, "global batch").endswith("(manifest: sequences of 2,048 tokens)")


def test_a_manifest_with_smaller_sizes_keeps_its_own(write_manifest: WriteManifest) -> None:
    small = {"batch_size": 2, "gradient_accumulation_steps": 2, "max_seq_length": 256, "max_steps": 10}
    plan = smoke(str(write_manifest({f"training.config.{key}": value for key, value in small.items()})))
    assert sizes_of(plan) == SIZES | {"batch": (4, 256), "steps": 10}
    assert "batch_size 2 x gradient_accumulation_steps 2" in decision(plan, "global batch")
    assert decision(plan, "training length") == "10 steps | max_steps"


def test_many_steps_of_the_manifest_are_cut(write_manifest: WriteManifest) -> None:
    plan = smoke(str(write_manifest({"training.config.max_steps": 1000})))
    assert plan.schedule.num_steps == 60
    assert decision(plan, "training length").endswith("(manifest: 1,000 steps)")


def test_never_stays_never(write_manifest: WriteManifest) -> None:
    never = {"evaluation_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    plan = smoke(str(write_manifest({f"training.config.{key}": value for key, value in never.items()})))
    assert sizes_of(plan) == SIZES | {"evaluation": (None, None), "saving": (None, None)}
    assert decision(plan, "evaluation") == "never | evaluation_strategy in the manifest"


def test_defaults_of_absent_manifest_keys_are_reported(write_manifest: WriteManifest) -> None:
    keys = ("evaluation_strategy", "save_strategy", "logging_steps")
    plan = smoke(str(write_manifest(drop=tuple(f"training.config.{key}" for key in keys))))
    assert sizes_of(plan) == SIZES
    for name in ("evaluation", "checkpoints", "logging"):
        assert decision(plan, name).endswith("smoke profile: short run (not in the manifest)")


def test_the_full_profile_is_untouched() -> None:
    plan = plan_for(gpu=None, profile="full")
    assert (plan.batch.global_batch_size, plan.batch.sequence_length) == (48, 2048)
    assert plan.optimizer.learning_rate == 2e-4
    assert not any("smoke" in d.reason for d in plan.decisions)


def test_the_plan_names_the_manifest_as_it_was_loaded() -> None:
    planned = plan_request(Request(expert="neo4j", profile="smoke"))
    assert planned.plan.manifest_sha256 == manifest_sha256(planned.loaded.manifest)
    assert planned.loaded.manifest.training.config.global_batch_size == 48


def test_positions_are_checked_at_the_length_that_is_trained(write_manifest: WriteManifest) -> None:
    long = write_manifest({"training.config.max_seq_length": 32768})
    assert smoke(str(long)).batch.sequence_length == 512
    with pytest.raises(ManifestError, match=r"8192 exceeds the 4096 positions of launcher/tiny") as raised:
        smoke(config={"max_seq_length": 8192})
    assert raised.value.hint == "use at most 4096, or --gpu NAME or --profile full for the manifest's base"


@pytest.mark.parametrize(
    ("row_tokens", "length", "batch"), [(100, 512, 8), (300, 1024, 4), (1000, 2048, 2), (9000, 4096, 1)]
)
def test_long_rows_get_longer_sequences_and_fewer(row_tokens: float, length: int, batch: int) -> None:
    config = load_manifest(find_manifest("neo4j")).manifest.training.config.model_copy(update={"max_seq_length": 8192})
    made, _ = make_smoke_sizes(config, frozenset(), row_tokens)
    assert (made.max_seq_length, made.global_batch_size) == (length, batch)


def test_layers_of_another_family_are_those_of_the_tiny_base() -> None:
    config = load_manifest(find_manifest("neo4j")).manifest.training.config
    phi = config.model_copy(update={"target_modules": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")})
    made, replaced = make_smoke_sizes(phi, frozenset())
    assert made.target_modules == (*config.target_modules[:3], "o_proj", "gate_proj", "up_proj", "down_proj")
    assert "the tiny base has other module names" in replaced["adapter"]
