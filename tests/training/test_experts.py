"""Mixture-of-experts bases: LoRA on attention and on stacked experts equals plain PEFT; the rest is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from launcher.base_models.families import FAMILIES
from launcher.core.errors import InputError, ManifestError, RunFailedError
from launcher.corpus.store import Store
from launcher.request.request import Request, plan_request
from launcher.training.checkpoint.weights import read_exact_weights, save_weights, write_exact_weights
from launcher.training.data.collate import PackedBatch
from launcher.training.model.attention import BACKENDS
from tests.conftest import ROOT
from tests.training.builders import (
    build,
    gradients,
    relative_difference,
    train_recorded,
    trained_weights,
    vary,
    wake_adapter,
    write_base,
)
from tests.training.test_families import MIXTURES, make_family_config, plan_family
from tests.training.verify.test_packing import WRONG, build_and_check


def list_stacks(model_type: str) -> list[str]:
    keys = FAMILIES[model_type].experts
    assert keys is not None
    return [f"{keys.path}.gate_up_proj", f"{keys.path}.down_proj"]


def load_plain(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32, attn_implementation="eager")


def compute_plain_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    """The summed loss of a packed batch, one document at a time."""
    lengths = [length for length in batch.document_lengths if length]
    documents = batch.input_ids[0, : sum(lengths)].split(lengths)
    logits = torch.cat([model(input_ids=ids[None]).logits[0] for ids in documents])
    return functional.cross_entropy(logits[batch.trained_positions], batch.targets, reduction="sum")


@pytest.mark.parametrize("adapts_experts", [False, True], ids=["attention", "experts"])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_gradients_are_those_of_plain_peft(store: Store, tmp_path: Path, model_type: str, adapts_experts: bool) -> None:
    base = write_base(tmp_path / "base", make_family_config(model_type))
    plan = plan_family(base, target_parameters=list_stacks(model_type) if adapts_experts else [])
    run = build(plan, store, tmp_path / "run", is_checked=True)
    wake_adapter(run)
    trained = trained_weights(run)
    assert sum(weight.numel() for weight in trained.values()) == plan.adapter.trainable_parameters
    assert any("experts" in name for name in trained) == adapts_experts
    module, batch = run.engine.module, run.batches()[0]
    loss = module(batch)
    loss.backward()
    peft_model: Any = module.model
    plain: Any = get_peft_model(load_plain(base), peft_model.peft_config["default"])
    plain.load_state_dict({name.removeprefix("model."): weight for name, weight in trained.items()}, strict=False)
    expected = compute_plain_loss(plain, batch)
    expected.backward()
    theirs = {f"model.{name}": p.grad for name, p in plain.named_parameters() if p.requires_grad}
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert relative_difference(gradients(run), theirs) < 1e-4


@pytest.mark.parametrize("model_type", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_rounding_that_selects_other_experts_is_not_an_error(store: Store, tmp_path: Path, model_type: str) -> None:
    base = write_base(tmp_path / "base", make_family_config(model_type))
    bf16 = {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"}
    check = build_and_check(vary(plan_family(base), bf16), store, tmp_path, "eager")
    assert 0 < check.hidden < 2 * check.routing + 0.15
    assert check.routing < check.without_boundaries


def test_leakage_in_a_mixture_of_experts_is_detected(
    monkeypatch: pytest.MonkeyPatch, store: Store, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", make_family_config("qwen3_moe"))
    bf16 = {"precision.compute_dtype": "bf16", "precision.base_dtype": "bf16"}
    monkeypatch.setitem(BACKENDS, "sdpa", WRONG["ignores boundaries"])
    with pytest.raises(RunFailedError, match="the attention backend sdpa"):
        build_and_check(vary(plan_family(base), bf16), store, tmp_path, "sdpa")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_experts_are_saved_loaded_and_merged(store: Store, tmp_path: Path, model_type: str) -> None:
    base = write_base(tmp_path / "base", make_family_config(model_type))
    run = build(plan_family(base, target_parameters=list_stacks(model_type)), store, tmp_path / "run", is_checked=True)
    train_recorded(run)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    trained = {name.removeprefix("model."): weight for name, weight in trained_weights(run).items()}
    write_exact_weights(run, folder, trained)
    torch.testing.assert_close(dict(read_exact_weights(run, folder)), trained, rtol=0, atol=0)
    save_weights(run, tmp_path / "adapter")
    tokens = torch.arange(1, 30)[None]
    with torch.no_grad():
        without = load_plain(base)(tokens).logits
        run.engine.module.base.set_attn_implementation("eager")
        expected = run.engine.module.model.eval()(tokens).logits
        loaded: Any = PeftModel.from_pretrained(load_plain(base), str(tmp_path / "adapter"))
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-4, atol=1e-5)
        merged = loaded.merge_and_unload(safe_merge=True)
        merged.save_pretrained(str(tmp_path / "merged"))
        written = load_plain(tmp_path / "merged")(tokens).logits
    torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(without, expected, atol=1e-4)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", make_family_config("qwen3_moe"))
    stacks = list_stacks("qwen3_moe")
    for kind, config, message in (
        ("full", {}, "auxiliary loss"),
        ("dora", {"target_parameters": stacks}, "no DoRA for stacked experts"),
        ("lora", {"target_parameters": stacks, "dropout": 0.1}, "no dropout for stacked experts"),
        ("lora", {"target_parameters": ["experts.up_proj"]}, r"has no experts.up_proj"),
        ("lora", {"target_modules": ["gate_proj"]}, "does not have all target modules"),
    ):
        with pytest.raises(ManifestError) as caught:
            plan_family(base, kind, **config)
        assert message in str(caught.value), message


def write_mxfp4(base: Path, target: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a gpt-oss folder by random MXFP4 blocks, and return their values."""
    shutil.copytree(base, target)
    weights = load_file(target / "model.safetensors")
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = {}
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inner, outer = weights.pop(name).shape
        codes = torch.randint(0, 16, (count, outer, inner // 32, 32), generator=generator)
        scales = torch.randint(124, 127, (count, outer, inner // 32), generator=generator)
        signed = table[codes % 8] * torch.where(codes >= 8, -1.0, 1.0) * 2.0 ** (scales - 127)[..., None]
        values[name] = signed.reshape(count, outer, inner).transpose(1, 2)
        weights[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        weights[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
    }
    (target / "config.json").write_text(json.dumps(config))
    return values


def test_mxfp4_weights_of_gpt_oss_are_dequantized(store: Store, tmp_path: Path) -> None:
    plain = write_base(tmp_path / "plain", make_family_config("gpt_oss"))
    values = write_mxfp4(plain, tmp_path / "base")
    plan = plan_family(tmp_path / "base", target_parameters=list_stacks("gpt_oss"))
    run = build(plan, store, tmp_path / "run", is_checked=True)
    weights = {name.replace(".base_layer", ""): p for name, p in run.engine.module.base.named_parameters()}
    assert values
    for name, value in values.items():
        torch.testing.assert_close(weights[name].float(), value, rtol=0, atol=0)
    assert train_recorded(run).losses


def test_strategies_that_are_not_verified_are_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", make_family_config("qwen3_moe"))
    request = Request(
        expert=str(ROOT / "experts/neo4j/manifest.json"), base=str(base), profile="full", gpu="h100", gpus_per_node=2
    )
    short = "training.config.max_seq_length=64"
    none = ("base_models.0.quantization=none", "training.config.target_modules=all-linear", short)
    with pytest.raises(InputError, match="zero3 is not verified for mixtures of experts; use ddp or fsdp2"):
        plan_request(replace(request, strategy="zero3", overrides=none))
    stacks = 'training.config.target_parameters=["mlp.experts.down_proj"]'
    with pytest.raises(InputError, match="fsdp2 does not support target_parameters"):
        plan_request(replace(request, strategy="fsdp2", overrides=(*none, stacks)))
    with pytest.raises(ManifestError, match="bitsandbytes quantizes linear layers only"):
        plan_request(replace(request, overrides=(*none[1:], "base_models.0.quantization=int4")))
