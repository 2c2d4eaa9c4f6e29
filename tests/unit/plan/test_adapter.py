"""Target modules: names that the base has are planned, others are refused, and counts are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.core.errors import LauncherError
from launcher.plan.estimate.memory.recipe import select_targets
from launcher.plan.resume_identity import collect_learning_settings, find_changed_settings
from tests.unit.plan.conftest import FULL_FINE_TUNING, plan_for

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
GEMMA3 = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": SIZES,
    "vision_config": {"hidden_size": 24},
}


def write_config(folder: Path, model_type: str, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": model_type, **changes}))
    return str(folder)


def test_fused_names_of_a_family_are_planned_without_weights(tmp_path: Path) -> None:
    base = write_config(tmp_path, "gpt_neox")
    plan = plan_for(base=base, config={"target_modules": NEOX, "rank": 4})
    assert plan.adapter.target_modules == NEOX
    assert plan.adapter.trainable_parameters == 2 * 4 * (64 + 192 + 64 + 64 + 64 + 96 + 96 + 64)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("gpt_neox", NEOX),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("glm4", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("starcoder2", ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj")),
        ("arcee", ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
    ],
)
def test_all_linear_selects_every_linear_layer(tmp_path: Path, model_type: str, names: tuple[str, ...]) -> None:
    base = write_config(tmp_path, model_type, head_dim=16)
    plan = plan_for(base=base, config={"target_modules": "all-linear"})
    assert plan.adapter.target_modules == names
    named = plan_for(base=base, config={"target_modules": names})
    assert named.adapter == plan.adapter
    assert named.memory == plan.memory


@pytest.mark.parametrize("model_type", ["gpt_neox", "phi3"])
def test_wrong_names_are_refused_with_those_that_exist(tmp_path: Path, model_type: str) -> None:
    base = write_config(tmp_path, model_type)
    with pytest.raises(LauncherError, match="has no q_proj") as caught:
        plan_for(base=base, config={"target_modules": ["q_proj"]})
    assert caught.value.hint is not None
    assert '"all-linear" selects all of them' in caught.value.hint
    assert ("query_key_value" if model_type == "gpt_neox" else "qkv_proj") in caught.value.hint


@pytest.mark.parametrize("targets", [["wqkv", "wo"], "all-linear"])
def test_names_of_an_unknown_architecture_are_not_refused(tmp_path: Path, targets: Any) -> None:
    """Without weights its names are unknown; the estimate counts all linear layers."""
    plan = plan_for(base=write_config(tmp_path, "brandnew"), config={"target_modules": targets, "rank": 4})
    assert plan.base.basis == "approximate"
    assert plan.adapter.target_modules == ((targets,) if isinstance(targets, str) else tuple(targets))
    assert select_targets(plan.base, plan.adapter.target_modules) == plan.base.linears
    assert plan.adapter.trainable_parameters > 0
    assert any("unknown architecture" in note for note in plan.notes)


def test_all_linear_in_the_smoke_profile() -> None:
    plan = plan_for(gpu=None, profile="smoke", config={"target_modules": "all-linear"})
    assert len(plan.adapter.target_modules) == 7


@pytest.mark.parametrize("value", ["all_linear", "q_proj", 7])
def test_other_strings_are_refused(value: object) -> None:
    with pytest.raises(LauncherError, match="target_modules"):
        plan_for(config={"target_modules": value})


def test_vision_tower_is_counted_but_not_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    plan = plan_for(gpu="h100", base=str(tmp_path), overrides=FULL_FINE_TUNING)
    assert plan.base.frozen_parameters > 0
    assert plan.adapter.trainable_parameters == plan.base.num_parameters - plan.base.frozen_parameters
    with pytest.raises(LauncherError, match="cannot save the frozen vision tower"):
        plan_for(gpu="h100", gpus=2, strategy="fsdp2", base=str(tmp_path), overrides=FULL_FINE_TUNING)


def test_attention_dropout_of_the_base_is_reported(tmp_path: Path) -> None:
    plan = plan_for(base=write_config(tmp_path, "seed_oss", head_dim=16), config={"target_modules": "all-linear"})
    assert any("attention_dropout of 0.1 is not applied" in note for note in plan.notes)
    plan = plan_for(base=write_config(tmp_path, "seed_oss", head_dim=16, attention_dropout=0.0))
    assert not any("attention_dropout of" in note for note in plan.notes)


def test_settings_that_older_checkpoints_lack_have_their_defaults() -> None:
    newer = {"adapter.use_rslora", "adapter.target_parameters", "optimizer.loraplus_lr_ratio", "data.end_token"}
    now = collect_learning_settings(plan_for())
    before = {key: value for key, value in now.items() if key not in newer}
    assert newer <= now.keys()
    assert find_changed_settings(before, now) == ()
    rslora = collect_learning_settings(plan_for(overrides=("training.config.use_rslora=true",)))
    (problem,) = find_changed_settings(before, rslora)
    assert (problem.where, problem.what) == ("adapter.use_rslora", "False before, True now")


@pytest.mark.parametrize("tied", [True, False])
def test_modules_to_save_are_counted_with_their_states(tmp_path: Path, tied: bool) -> None:
    base = write_config(tmp_path, "llama", tie_word_embeddings=tied, vocab_size=32_000)
    plain = plan_for(base=base)
    both = plan_for(base=base, config={"modules_to_save": ["embed_tokens", "lm_head"]})
    added = 32_000 * 64 * (1 if tied else 2)
    assert both.adapter.trainable_parameters == plain.adapter.trainable_parameters + added
    for name in ("adapter", "gradients", "optimizer"):
        before, now = (next(t.num_bytes for t in plan.memory.terms if t.name == name) for plan in (plain, both))
        assert now - before >= 4 * added * (2 if name == "optimizer" else 1)
    (decision,) = [each for each in both.decisions if each.name == "trained modules"]
    assert ("one trained weight serves both" in decision.reason) == tied


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modules_to_save": ["norm"]}, "norm cannot be trained completely with an adapter"),
        ({"modules_to_save": ["lm_head"], "strategy": "fsdp2"}, "fsdp2 does not support modules_to_save"),
        ({"modules_to_save": ["lm_head"], "strategy": "zero3"}, "zero3 does not support modules_to_save"),
    ],
)
def test_modules_to_save_that_cannot_be_trained_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(LauncherError) as caught:
        plan_for(config=config)
    assert message in str(caught.value)


def test_modules_to_save_never_lead_to_sharding() -> None:
    plan = plan_for(config={"modules_to_save": ["embed_tokens"]}, gpus=8)
    assert plan.strategy == "ddp"


@pytest.mark.parametrize(
    ("tied", "saved", "rows"),
    [(True, [], 1), (False, [], 2), (True, ["embed_tokens"], 0), (False, ["embed_tokens"], 1)],
)
def test_new_tokens_are_trained_row_by_row(tmp_path: Path, tied: bool, saved: list[str], rows: int) -> None:
    base = write_config(tmp_path, "llama", tie_word_embeddings=tied)
    without, plan = (
        plan_for(base=base, config={"modules_to_save": saved, "new_tokens": tokens}) for tokens in ([], ["<a>", "<b>"])
    )
    assert plan.data.new_tokens == ("<a>", "<b>")
    assert plan.adapter.trainable_parameters - without.adapter.trainable_parameters == rows * 2 * 64
    assert find_changed_settings(collect_learning_settings(without), collect_learning_settings(plan))


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("llama", {"strategy": "zero2"}, "zero2 does not support new_tokens"),
        ("llama", {"new_tokens": ["a", "a"]}, "must be different texts"),
        ("llama", {"new_tokens": [" "]}, "must be different texts that are not blank"),
        ("phi", {}, "has a bias, which PEFT drops"),
    ],
)
def test_new_tokens_that_cannot_be_trained_are_refused(
    tmp_path: Path, model_type: str, config: dict[str, Any], message: str
) -> None:
    base = write_config(tmp_path, model_type)
    with pytest.raises(LauncherError) as caught:
        plan_for(base=base, config={"target_modules": "all-linear", "new_tokens": ["<a>"], **config})
    assert message in str(caught.value)


def test_pissa_is_explained_and_never_sharded() -> None:
    plan = plan_for(
        config={"init_lora_weights": "pissa_niter_16"}, gpus=8, overrides=("base_models.0.quantization=none",)
    )
    assert (plan.adapter.init_lora_weights, plan.strategy) == ("pissa_niter_16", "ddp")
    (decision,) = [each for each in plan.decisions if each.name == "LoRA initialization"]
    assert f"saved as LoRA of rank {2 * (plan.adapter.rank or 0)}" in decision.value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("base_models.0.quantization=int4",), "not possible in 4 bits"),
        (("base_models.0.quantization=none", "training.config.strategy=fsdp2"), "fsdp2 does not support PiSSA"),
        (("training.config.adapter_type=dora",), "pissa is not supported with adapter_type dora"),
        (("training.config.init_lora_weights=olora",), "init_lora_weights"),
    ],
)
def test_pissa_that_cannot_work_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(LauncherError) as caught:
        plan_for(overrides=("training.config.init_lora_weights=pissa", *overrides))
    assert message in str(caught.value)


def test_names_of_an_index_without_weights_are_planned_and_others_refused(tmp_path: Path) -> None:
    base = write_config(tmp_path, "llama")
    names = [f"model.layers.{i}.attn.{name}.weight" for i in range(2) for name in ("wqkv", "wo", "norm")]
    index = {"weight_map": dict.fromkeys([*names, "lm_head.weight"], "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert plan_for(base=base, config={"target_modules": ["wqkv", "wo"]}).adapter.target_modules == ("wqkv", "wo")
    with pytest.raises(LauncherError, match="has no q_proj") as caught:
        plan_for(base=base, config={"target_modules": ["q_proj"]})
    assert "its linear layers: wqkv, wo" in (caught.value.hint or "")
