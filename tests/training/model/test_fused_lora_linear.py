"""Fused LoRA layers against PEFT's own, which multiply by one matrix at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, OlmoConfig, Qwen3Config

from launcher.base_models.shapes import make_shape
from launcher.plan.estimate.memory.recipe import count_trainable
from launcher.plan.estimate.memory.static import estimate_static
from launcher.plan.model import CompilePlan
from launcher.training.kernels.seeded_dropout import SeededDropout
from launcher.training.model import compile_checkpoint as layers_module
from launcher.training.model.compile_checkpoint import prepare_layers
from launcher.training.model.fused_lora.linear import (
    FusedLoraLinear,
    FusedLoraModel,
    apply_fused_linear,
    fuse_lora_layers,
)
from launcher.training.model.fused_lora.reference import use_reference_forward
from tests.training.builders import make_recipe

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "vocab_size": 96,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# What distinguishes a family's layers from Llama's.
FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "gemma": {},
    "gemma2": {
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 9,
    },
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 9},
    "granite": {
        "attention_multiplier": 0.5,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "phi3": {"pad_token_id": 0},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
}
IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(3))
TOLERANCE = 5e-6  # relative; fp32 sums in a different order


def make_config(family: str, bias: bool) -> Any:
    if family == "qwen3":
        return Qwen3Config(**SIZES, attention_bias=bias)
    if family == "olmo":
        return OlmoConfig(**SIZES, clip_qkv=0.05, pad_token_id=0)
    return LlamaConfig(**SIZES) if family == "llama" else AutoConfig.for_model(family, **SIZES, **FAMILY_KEYS[family])


def make_model(
    *, dora: bool = False, dropout: float = 0.0, bias: bool = False, family: str = "qwen3", targets: Any = ALL
) -> Any:
    torch.manual_seed(0)
    config: Any = make_config(family, bias)
    lora = LoraConfig(r=4, lora_alpha=6, use_dora=dora, lora_dropout=dropout, target_modules=targets)
    model: Any = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def use_same_dropout_mask(model: Any) -> None:
    """Use one mask for all: PEFT draws one per matrix, we draw one per input."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and isinstance(module.lora_dropout["default"], nn.Dropout):
            module.lora_dropout["default"] = SeededDropout(module.lora_dropout["default"].p, 5)


def get_layers(model: Any) -> list[nn.Module]:
    return list(model.get_base_model().model.layers)


def fuse(model: Any, **options: Any) -> FusedLoraModel:
    fused_model = fuse_lora_layers(get_layers(model), torch.float32, **options)
    fused_model.refresh()
    return fused_model


def compute(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def check_same(
    ours: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], tolerance: float = TOLERANCE
) -> None:
    assert float(ours[0]) == pytest.approx(float(expected[0]), rel=tolerance)
    assert ours[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert float((ours[1][name] - grad).norm() / grad.norm()) < tolerance, name


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_equal_pefts(family: str, dora: bool, bias: bool) -> None:
    model = make_model(dora=dora, bias=bias, family=family)
    expected = compute(model)
    fused_model = fuse(model)
    assert len(fused_model.weights) == 4 * SIZES["num_hidden_layers"]
    check_same(compute(model), expected)
    with use_reference_forward():
        check_same(compute(model), expected)


def test_projections_that_are_clipped_in_place_stay_with_peft() -> None:
    model = make_model(family="olmo")
    expected = compute(model)
    fused_model = fuse(model)
    assert len(fused_model.weights) == 3 * SIZES["num_hidden_layers"]
    check_same(compute(model), expected)


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "v_proj", "down_proj"]])
def test_fused_weights_have_the_planned_size(targets: list[str]) -> None:
    """Rank 4: a fused weight of three matrices has 12 ranks, padded to 16."""
    model = make_model(targets=targets)
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    all_weights = fuse(model).weights
    border = sum(
        weights.materialize().numel() - weights.members[0].in_features * sum(weights.shape.out_features)
        for weights in all_weights
    )
    recipe = make_recipe(targets)
    shape = make_shape(model.config.to_dict(), "qwen3", "config")
    assert count_trainable(shape, "lora", 4, tuple(targets)) == own
    assert estimate_static(shape, recipe).adapter == 4 * (own + border)


@pytest.mark.parametrize(
    ("dora", "dropout", "checkpointing"),
    [
        (True, 0.3, "selective"),  # without checkpointing, and with the full one: test_fused_decoder_layer.py
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                *((dora, dropout, "none") for dora in (False, True) for dropout in (0.0, 0.3)),
                *((False, 0.0, checkpointing) for checkpointing in ("selective", "full")),
            )
        ),
    ],
)
def test_one_compiled_graph_serves_all_layers_except_the_first(
    monkeypatch: pytest.MonkeyPatch, dora: bool, dropout: float, checkpointing: Any
) -> None:
    """The input of the first layer needs no gradient."""
    monkeypatch.setattr(layers_module, "SELECTIVE_MIN_INNER", 32)
    model = make_model(dora=dora, dropout=dropout)
    use_same_dropout_mask(model)
    expected = compute(model.train())
    fuse(model, compiled=True)
    prepare_layers(get_layers(model), checkpointing, CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), expected)
    assert layers_module.is_compile_enabled(), "torch.compile must not have fallen back to eager"
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_gradients_with_activation_checkpointing(monkeypatch: pytest.MonkeyPatch, checkpointing: Any) -> None:
    monkeypatch.setattr(layers_module, "SELECTIVE_MIN_INNER", 32)
    model = make_model()
    expected = compute(model)
    fuse(model)
    prepare_layers(get_layers(model), checkpointing, None)
    model.train()
    check_same(compute(model), expected)
    assert not counters["stats"]["unique_graphs"]


def test_refresh_copies_changed_parameters() -> None:
    model = make_model()
    fused_model = fuse(model)
    before = compute(model)[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    fused_model.refresh()
    after = compute(model)[0]
    assert float(after) != float(before)
    with use_reference_forward():
        assert float(compute(model)[0]) == pytest.approx(float(after), rel=TOLERANCE)


def test_forced_refresh_copies_writes_that_do_not_bump_the_version() -> None:
    model = make_model()
    fused_model = fuse(model)
    before = compute(model)[0]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.add_(0.05)  # as an optimizer's own kernel writes
    fused_model.refresh()
    assert float(compute(model)[0]) == float(before)
    fused_model.refresh(force=True)
    assert float(compute(model)[0]) != float(before)


def test_base_weights_are_views_and_state_dict_is_unchanged() -> None:
    model, plain = make_model(), make_model()
    fused_model = fuse(model)
    for weights in fused_model.weights:
        for member in weights.members:
            weight = member.base_layer.weight
            assert weight.untyped_storage().data_ptr() == weights.materialize().untyped_storage().data_ptr()
    ours, expected = model.state_dict(), plain.state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_with_dropout_equal_pefts_under_the_same_mask(dora: bool, bias: bool) -> None:
    model = make_model(dora=dora, bias=bias, dropout=0.3)
    if dora:
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.data *= 1 + 0.2 * torch.rand_like(parameter)
    use_same_dropout_mask(model)
    expected = compute(model.train())
    without_dropout = compute(model.eval())
    assert float(expected[0]) != pytest.approx(float(without_dropout[0]), rel=1e-4), "dropout has no effect"
    model.train()
    assert len(fuse(model).weights) == 4 * SIZES["num_hidden_layers"]
    check_same(compute(model), expected)


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_is_active_in_training_mode_only(dora: bool) -> None:
    model = make_model(dropout=0.5, dora=dora)
    expected = compute(model.eval())
    fuse(model)
    check_same(compute(model), expected)
    model.train()
    torch.manual_seed(1)
    one = compute(model)
    torch.manual_seed(1)
    check_same(compute(model), one)
    torch.manual_seed(2)
    assert float(compute(model)[0]) != float(one[0])


@pytest.mark.parametrize("dora", [False, True])
def test_gradient_with_dropout_passes_gradcheck(dora: bool) -> None:
    """Every call uses the same seed, so the mask is constant."""
    model = make_model(dropout=0.5, dora=dora, targets=["gate_proj", "up_proj"]).double()
    fuse_lora_layers(get_layers(model), torch.float64).refresh()
    first: Any = get_layers(model)[0]
    member = first.mlp.gate_proj
    assert isinstance(member, FusedLoraLinear)
    x = torch.randn(2, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    weights = member.fused_weights

    def output(given: Tensor) -> Tensor:
        torch.manual_seed(4)
        return apply_fused_linear(weights, given)[0]

    assert torch.autograd.gradcheck(output, (x,))


def test_each_fused_weight_is_applied_once_and_its_cache_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    fused_model = fuse(model)
    seen: list[int] = []

    def apply_and_record(weights: Any, x: Tensor) -> tuple[Tensor, ...]:
        seen.append(fused_model.weights.index(weights))
        return apply_fused_linear(weights, x)

    monkeypatch.setattr("launcher.training.model.fused_lora.linear.apply_fused_linear", apply_and_record)
    compute_loss(model)
    assert sorted(seen) == list(range(len(fused_model.weights)))
    assert all(weights.cached_input is None and weights.cached_outputs == () for weights in fused_model.weights)


@pytest.mark.parametrize(
    ("family", "compiled", "frees"), [("qwen3", True, False), ("qwen3", False, True), ("llama", True, True)]
)
def test_saved_values_do_not_keep_queries_and_keys_alive(family: str, compiled: bool, frees: bool) -> None:
    """With a compiled QK-norm these are saved anyway."""
    model = make_model(family=family)
    fused_model = fuse(model, compiled=compiled)
    weights = next(weights for weights in fused_model.weights if len(weights.members) == 3)
    query, key, value = apply_fused_linear(weights, torch.randn(5, SIZES["hidden_size"]))
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert (value.untyped_storage().data_ptr() != query.untyped_storage().data_ptr()) == frees


def test_layers_that_cannot_be_fused_stay_with_peft() -> None:
    assert fuse_lora_layers(get_layers(make_model()), torch.bfloat16).weights == []
    few = fuse(make_model(targets=["q_proj", "v_proj", "down_proj"])).weights
    assert sorted(len(weights.members) for weights in few) == [1, 1, 2, 2]


def test_disabled_adapter_has_no_effect() -> None:
    model = make_model()
    fuse(model)
    with model.disable_adapter():
        alone = compute_loss(model)
    assert alone != pytest.approx(compute_loss(model), rel=1e-4)
    with model.disable_adapter(), use_reference_forward():
        assert compute_loss(model) == alone


def compute_loss(model: Any) -> float:
    with torch.no_grad():
        return float(model(input_ids=IDS, labels=IDS, use_cache=False).loss)
