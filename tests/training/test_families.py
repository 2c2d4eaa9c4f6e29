"""Every family: what the plan accepts is trained, with the planned number of parameters; the rest is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launcher.base_models.families import FAMILIES
from launcher.core.errors import LauncherError
from launcher.corpus.store import Store
from launcher.plan.estimate.memory.recipe import FUSED_FAMILIES, explain_layer_path
from launcher.plan.estimator_inputs import recipe_from_plan
from launcher.plan.model import Plan
from launcher.request.request import Request, plan_request
from launcher.training.checkpoint.weights import save_weights
from launcher.training.model.layer_path import describe_path
from tests.conftest import ROOT
from tests.training.builders import (
    SEQUENCE_LENGTH,
    SIZES,
    build,
    train_recorded,
    trained_weights,
    vary,
    write_base,
)
from tests.training.tiny_configs import make_tiny_config

TEXT = {**SIZES, "num_key_value_heads": 1}
EXPERT_SIZES = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES = sorted(name for name, family in FAMILIES.items() if family.experts is not None)
DENSE = sorted(FAMILIES.keys() - set(MIXTURES))
FP8_LAYERS = {"precision.fp8_layers": True}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
}


def make_family_config(model_type: str) -> PretrainedConfig:
    changes: dict[str, Any] = {"sliding_window": 24, "attention_dropout": 0.0}
    changes |= EXPERT_SIZES if model_type in MIXTURES else {}
    if model_type == "olmoe":  # its eager attention ignores a window
        del changes["sliding_window"]
    return AutoConfig.for_model(model_type, **{**SIZES, **changes})


def make_vision_config() -> Gemma3Config:
    return Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=5)


def plan_family(base: Path, kind: str = "lora", **config: Any) -> Plan:
    """Plan from a manifest, as a user does: no field of the plan is changed."""
    tree = json.loads((ROOT / "experts/neo4j/manifest.json").read_text())
    settings = tree["training"]["config"]
    settings |= {"max_seq_length": SEQUENCE_LENGTH, "batch_size": 4, "gradient_accumulation_steps": 1}
    settings |= {"learning_rate": 5e-3, "optim": "adamw_torch", "adapter_type": kind, "max_steps": 2, "dropout": 0.0}
    settings |= {"evaluation_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    settings |= {"rank": 4, "alpha": 8, "target_modules": "all-linear", **config}
    for key in ("rank", "alpha", "target_modules", "dropout") if kind == "full" else ():
        del settings[key]
    manifest = base.parent / "manifest.json"
    manifest.write_text(json.dumps(tree))
    return plan_request(Request(expert=str(manifest), base=str(base), profile="full")).plan


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        *((name, "lora") for name in sorted(FAMILIES)),
        *(pytest.param(name, "dora", marks=pytest.mark.slow) for name in sorted(FAMILIES)),
        *(pytest.param(name, "full", marks=pytest.mark.slow) for name in DENSE),
    ],
)
def test_planned_families_are_trained_as_planned(store: Store, tmp_path: Path, model_type: str, kind: str) -> None:
    plan = plan_family(write_base(tmp_path / "base", make_family_config(model_type)), kind)
    run = build(plan, store, tmp_path / "run", is_checked=True)
    before = trained_weights(run)
    assert len(train_recorded(run).losses) == 2
    assert sum(weight.numel() for weight in before.values()) == plan.adapter.trainable_parameters
    moved = [name for name, weight in trained_weights(run).items() if not torch.equal(weight, before[name])]
    assert moved


@pytest.mark.parametrize(
    "model_type", ["qwen3", "phi3", *(pytest.param(name, marks=pytest.mark.slow) for name in DENSE)]
)
def test_families_are_fully_trained_in_fp8(store: Store, tmp_path: Path, model_type: str) -> None:
    """The build compares gradients with FP32. On a CPU the plan refuses FP8, so the field is set here."""
    plan = vary(plan_family(write_base(tmp_path / "base", make_family_config(model_type)), "full"), FP8_LAYERS)
    run = build(plan, store, tmp_path / "run", is_checked=True)
    path, _ = explain_layer_path(plan.base, recipe_from_plan(plan))
    assert describe_path(run.engine.module.layers) == path
    assert all(math.isfinite(loss) for loss in train_recorded(run).losses)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("model_type", sorted(FUSED_FAMILIES))
def test_fp8_blocks_of_every_fused_family_run_on_a_gpu(store: Store, tmp_path: Path, model_type: str) -> None:
    """With sizes that the plan would refuse as too small to gain."""
    sizes = {**SIZES, "hidden_size": 128, "head_dim": 256 if "gemma" in model_type else 64, "sliding_window": 24}
    base = write_base(tmp_path / "base", AutoConfig.for_model(model_type, **sizes))
    run = build(vary(plan_family(base, "full"), FP8_LAYERS), store, tmp_path / "run", is_checked=True)
    assert describe_path(run.engine.module.layers) == ("MLP" if model_type == "phi3" else "blocks")
    assert all(math.isfinite(loss) for loss in train_recorded(run).losses)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("model_type", sorted(FUSED_FAMILIES))
def test_blocks_of_every_fused_family_run_on_a_gpu(store: Store, tmp_path: Path, model_type: str) -> None:
    """The build compares the gradients with PEFT's and an FP32 reference, and unfuses blocks that are too far off."""
    sizes = {**SIZES, "hidden_size": 128, "head_dim": 256 if "gemma" in model_type else 64, "sliding_window": 24}
    base = write_base(tmp_path / "base", AutoConfig.for_model(model_type, **sizes))
    run = build(plan_family(base), store, tmp_path / "run", is_checked=True)
    assert describe_path(run.engine.module.layers) == ("MLP" if model_type == "phi3" else "blocks")
    assert all(math.isfinite(loss) for loss in train_recorded(run).losses)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_adapters_stay_out_of_a_vision_tower(store: Store, tmp_path: Path, kind: str) -> None:
    base = write_base(tmp_path / "base", make_vision_config())
    config: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    if kind == "ia3":
        config |= {"rank": None, "alpha": None, "dropout": None, "feedforward_modules": ["down_proj"]}
    plan = plan_family(base, kind, **config)
    run = build(plan, store, tmp_path / "run", is_checked=True)
    names = list(trained_weights(run))
    assert names
    assert not any("vision" in name for name in names)
    assert sum(weight.numel() for weight in trained_weights(run).values()) == plan.adapter.trainable_parameters
    train_recorded(run)
    save_weights(run, tmp_path / "adapter")
    plain: Any = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(plain, str(tmp_path / "adapter")))
    saved = get_peft_model_state_dict(run.engine.module.model)
    torch.testing.assert_close(dict(loaded), dict(saved))


def test_full_fine_tuning_freezes_and_saves_a_vision_tower(store: Store, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", make_vision_config())
    plan = plan_family(base, "full")
    run = build(plan, store, tmp_path / "run", is_checked=True)
    trained = trained_weights(run)
    assert not any("vision" in name or "multi_modal" in name for name in trained)
    assert sum(weight.numel() for weight in trained.values()) == plan.adapter.trainable_parameters
    train_recorded(run)
    save_weights(run, tmp_path / "full")
    before: Any = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / "full"), output_loading_info=True)
    after, info = loaded
    assert not info["missing_keys"]
    for name, weight in after.state_dict().items():
        is_tower = "vision" in name or "multi_modal" in name
        assert torch.equal(weight, before.state_dict()[name]) == is_tower, name


@pytest.mark.parametrize("model_type", ["phi3", "gpt_neox", "starcoder2"])
def test_adapters_on_fused_projections_load_in_plain_peft(store: Store, tmp_path: Path, model_type: str) -> None:
    base = write_base(tmp_path / "base", make_family_config(model_type))
    run = build(plan_family(base), store, tmp_path / "run", is_checked=True)
    train_recorded(run)
    save_weights(run, tmp_path / "adapter")
    plain: Any = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    tokens = torch.arange(1, 30)[None]
    with torch.no_grad():
        without = plain(tokens).logits
        loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))(tokens).logits
        module = vary_backend(run)(tokens).logits
    torch.testing.assert_close(loaded, module, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(without, loaded, atol=1e-4)


def vary_backend(run: Any) -> Any:
    """Return the trained model with transformers' own attention."""
    model = run.engine.module.model.eval()
    run.engine.module.base.set_attn_implementation("eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - FAMILIES.keys()))
def test_other_model_types_are_refused_or_trained(store: Store, tmp_path: Path, model_type: str) -> None:
    """Every text-generation model that the installed transformers knows, built from the names of its config's keys."""
    try:
        base = write_base(tmp_path / "base", make_tiny_config(model_type))
    except Exception as error:  # config classes have their own rules
        pytest.skip(f"no tiny model: {type(error).__name__}")
    try:
        plan = plan_family(base)
    except LauncherError:
        return
    assert len(train_recorded(build(plan, store, tmp_path / "run", is_checked=True)).losses) == 2
