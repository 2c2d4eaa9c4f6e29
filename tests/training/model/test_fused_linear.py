"""Full fine-tuning with one matmul for layers that share an input equals separate matmuls."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.plan.model import CompilePlan
from launcher.training.model.fused_linear import FusedLinear, LinearGroup, fuse_linear_layers
from launcher.training.model.fused_lora.reference import use_reference_forward
from tests.training.builders import adapt, build, make_plan, make_uneven_packs, vary, write_base, write_store

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
COMPILE = CompilePlan(scope="layer", backend="aot_eager", mode=None)
IDS = torch.arange(24).reshape(2, 12)


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES))


def compute_grads(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()} | {"loss": loss.detach()}


def fuse(model: Any) -> list[LinearGroup]:
    return fuse_linear_layers(list(model.model.layers))


def relative_error(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert ours.keys() == expected.keys()
    return max(float((ours[name] - value).norm() / value.norm()) for name, value in expected.items())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_gradients_are_those_of_separate_layers(family: str) -> None:
    plain, fused = make_model(family), make_model(family)
    assert len(fuse(fused)) == 2 * SIZES["num_hidden_layers"]
    assert relative_error(compute_grads(fused, torch.float32), compute_grads(plain, torch.float32)) < 1e-5
    assert list(fused.state_dict()) == list(plain.state_dict())


def test_bf16_is_as_close_to_fp32_as_separate_layers() -> None:
    plain, fused, exact = make_model("qwen2"), make_model("qwen2"), make_model("qwen2")
    fuse(fused)
    expected = compute_grads(exact, torch.float32)
    errors = [relative_error(compute_grads(model, torch.bfloat16), expected) for model in (fused, plain)]
    assert errors[0] < 1.1 * errors[1]
    assert {parameter.grad.dtype for parameter in fused.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_compiled_graph_serves_all_layers(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, fused = make_model("qwen3"), make_model("qwen3")
    fuse(fused)
    for layer in fused.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert relative_error(compute_grads(fused, dtype), compute_grads(plain, dtype)) < tolerance
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_reference_forward_uses_separate_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    fuse(model)
    fetch = Mock(side_effect=AssertionError)
    monkeypatch.setattr(LinearGroup, "fetch", fetch)
    with use_reference_forward():
        model(input_ids=IDS)
    with pytest.raises(AssertionError):
        model(input_ids=IDS)


def test_outputs_are_cached_until_each_layer_has_fetched_its_own() -> None:
    group: Any = fuse(make_model("llama"))[0]
    x = torch.randn(3, SIZES["hidden_size"])
    for member in group.members:
        assert group.num_fetched == group.members.index(member)
        member(x)
    assert (group.cached_input, group.cached_outputs) == (None, ())
    group.members[0](x)
    assert group.cached_input is x
    group.clear_cache()
    assert group.cached_input is None


def test_layers_that_are_not_all_trained_stay_separate() -> None:
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.requires_grad_(False)
    groups = fuse(model)
    assert [len(group.members) for group in groups] == 4 * [2], "gate_proj and up_proj of each layer"
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_generation_with_a_cache_is_unchanged() -> None:
    plain = make_model("qwen3").eval()
    fused = copy.deepcopy(plain)
    fuse(fused)
    assert any(isinstance(module, FusedLinear) for module in fused.modules())
    expected, ours = (model.generate(IDS, max_new_tokens=8, do_sample=False) for model in (plain, fused))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("changes", "num_groups"),
    [
        ({**adapt("full"), "compile": COMPILE}, 4),
        ({**adapt("full"), "compile": COMPILE, "checkpointing": "selective"}, 0),
        (adapt("full"), 0),
        ({"compile": COMPILE}, 0),
    ],
    ids=["compiled", "selective", "eager", "LoRA"],
)
def test_only_compiled_full_fine_tuning_is_fused(changes: dict[str, Any], num_groups: int, tmp_path: Path) -> None:
    plan = vary(make_plan(write_base(tmp_path / "base")), changes)
    run = build(plan, write_store(tmp_path / "store", make_uneven_packs()), tmp_path / "run", is_checked=False)
    assert len(run.engine.module.linear_groups) == num_groups
