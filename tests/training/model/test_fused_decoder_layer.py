"""Fused attention and MLP blocks against transformers' and PEFT's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.plan.model import CompilePlan
from launcher.training.kernels import elementwise
from launcher.training.model.compile_checkpoint import prepare_layers
from launcher.training.model.fused_lora.decoder_layer import fuse_decoder_layers, list_fusable_blocks
from launcher.training.model.fused_lora.linear import FusedLoraModel, unfuse
from launcher.training.model.fused_lora.reference import use_reference_forward
from launcher.training.model.layer_path import describe_path
from tests.training.model.test_fused_lora_linear import (
    FAMILY_KEYS,
    SIZES,
    check_same,
    compute,
    fuse,
    get_layers,
    make_model,
    use_same_dropout_mask,
)

PARTIAL_TARGETS = [["q_proj", "v_proj", "up_proj", "down_proj"], ["k_proj", "gate_proj", "down_proj"]]


def fuse_blocks(model: Any, num_blocks: int) -> FusedLoraModel:
    layers = get_layers(model)
    fused_model = fuse(model, compiled=True, include_plain=list_fusable_blocks(layers))
    assert fuse_decoder_layers(layers) == num_blocks * SIZES["num_hidden_layers"]
    return fused_model


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_loss_and_gradients_equal_the_reference(family: str, dora: bool, dropout: float) -> None:
    model = make_model(dora=dora, family=family, dropout=dropout)
    use_same_dropout_mask(model)
    model.train()
    expected = compute(model)
    fuse_blocks(model, 2)
    check_same(compute(model), expected)
    with use_reference_forward():
        check_same(compute(model), expected)


def attend_plainly(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_more: Any,
) -> tuple[Tensor, None]:
    """Attention that applies every option it is given: transformers' SDPA ignores softcaps."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    scores = query @ key.mT * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    positions = torch.arange(query.shape[2])
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (distance < (sliding_window or len(positions)))
    return (torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ value).transpose(1, 2), None


def use_plain_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "plain", attend_plainly)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "plain", lambda *_, **__: None)
    model.get_base_model().config._attn_implementation = "plain"


@pytest.mark.parametrize("family", FAMILY_KEYS)
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_blocks_of_every_family_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, family: str, dora: bool, dropout: float
) -> None:
    """Norm weights are random: the published ones of Gemma are differences from 1."""
    model = make_model(dora=dora, family=family, dropout=dropout, targets="all-linear")
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=0.5 if "norm" in name else 0.0, std=0.1)
    use_same_dropout_mask(model)
    use_plain_attention(model, monkeypatch)
    model.train()
    expected = compute(model)
    fuses_attention = family != "phi3" and not (family == "qwen2" and dora)  # biases: for LoRA only
    fuse_blocks(model, 2 if fuses_attention else 1)
    assert describe_path(get_layers(model)) == ("blocks" if fuses_attention else "MLP")
    check_same(compute(model), expected, 2e-5)  # norms of small values: fp32 rounding of up to 1e-5
    with use_reference_forward():
        check_same(compute(model), expected)


def test_layers_with_different_windows_compile_to_one_graph_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 alternates two kinds of layers: more graphs would mean that one is compiled per layer."""
    monkeypatch.setitem(SIZES, "num_hidden_layers", 4)
    model = make_model(family="gemma2")
    use_plain_attention(model, monkeypatch)
    model.train()
    expected = compute(model)
    fuse_blocks(model, 2)
    counters.clear()
    prepare_layers(get_layers(model), "none", CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 3  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    ("dora", "dropout", "checkpointing"),
    [
        (True, 0.3, "full"),  # without checkpointing: test_compiled_blocks_include_layers_without_an_adapter
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                (True, 0.3, "none"),
                (False, 0.0, "none"),
                (True, 0.0, "none"),
                (True, 0.0, "full"),
                (False, 0.0, "full"),
                (False, 0.3, "none"),
            )
        ),
    ],
)
def test_compiled_gradients_equal_the_reference(dora: bool, dropout: float, checkpointing: Any) -> None:
    model = make_model(dora=dora, dropout=dropout)
    use_same_dropout_mask(model)
    model.train()
    expected = compute(model)
    fuse_blocks(model, 2)
    prepare_layers(get_layers(model), checkpointing, CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj", "up_proj", "down_proj"], ["k_proj", "gate_proj", "down_proj"]]
)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_fused_blocks_include_layers_without_an_adapter(targets: list[str], dora: bool, dropout: float) -> None:
    check_with_plain_layers(targets, dora, dropout, compiled=False)


def test_compiled_blocks_include_layers_without_an_adapter() -> None:
    check_with_plain_layers(PARTIAL_TARGETS[0], dora=True, dropout=0.3, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("targets", PARTIAL_TARGETS)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_blocks_include_layers_without_an_adapter_in_every_combination(
    targets: list[str], dora: bool, dropout: float
) -> None:
    check_with_plain_layers(targets, dora, dropout, compiled=True)


def check_with_plain_layers(targets: list[str], dora: bool, dropout: float, *, compiled: bool) -> None:
    """Every published manifest leaves gate_proj out."""
    model = make_model(dora=dora, dropout=dropout, targets=targets)
    use_same_dropout_mask(model)
    model.train()
    expected = compute(model)
    fused_model = fuse_blocks(model, 2)
    if compiled:
        prepare_layers(get_layers(model), "none", CompilePlan(scope="layer", backend="aot_eager", mode=None))
    check_same(compute(model), expected)
    assert not counters["graph_break"]
    assert sum(len(weights.members) for weights in fused_model.weights) == 6 * SIZES["num_hidden_layers"]
    if compiled:  # each of the following would compile again
        return
    with use_reference_forward():
        check_same(compute(model), expected)
    unfuse(fused_model)
    check_same(compute(model), expected)


def test_fused_weights_with_plain_layers_work_with_a_kv_cache() -> None:
    """Generation uses the family's own forward: plain layers run by themselves, and no output stays cached."""
    model = make_model(targets=["q_proj", "v_proj"]).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=True)
        fused_model = fuse_blocks(model, 1)
        ours = model(input_ids=ids, use_cache=True)
    assert torch.allclose(ours.logits, expected.logits, atol=1e-5)
    assert all(weights.cached_input is None and weights.cached_outputs == () for weights in fused_model.weights)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dora", [False, True])
def test_swiglu_output_is_not_saved(dora: bool, dropout: float) -> None:
    """Saved: the residual stream, its norm, gate and up, the LoRA columns, and two seeds with dropout.

    With DoRA also the unscaled output, and with dropout the correction of gate and up.
    """
    model = make_model(dora=dora, dropout=dropout)
    model.train()
    fuse_blocks(model, 2)
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        hidden = torch.randn(1, 24, SIZES["hidden_size"])
        layer: Any = get_layers(model)[0]
        out = layer.mlp(hidden)
    num_bytes = sum(size for address, size in saved.items() if address not in weights)
    ranks = 8 + 8  # two of rank 4, and one of rank 4 padded to 8
    hidden_size, intermediate = SIZES["hidden_size"], SIZES["intermediate_size"]
    expected_values = 2 * hidden_size + 2 * intermediate + ranks
    if dora:
        expected_values += hidden_size + (2 * intermediate if dropout else 0)
    assert out.shape == hidden.shape
    rest = num_bytes - 4 * 24 * expected_values
    scale_bytes = 4 * (3 * hidden_size + 4 * intermediate)  # DoRA's scale per output
    assert 0 <= rest <= (scale_bytes if dora else 0) + (8 if dropout else 0)


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({"bias": True}, 2),  # of the attention, which are added
        ({"bias": True, "dora": True}, 1),  # DoRA would scale them
        ({"targets": ["o_proj", "up_proj"]}, 0),
        ({"targets": ["q_proj", "k_proj", "v_proj", "gate_proj"]}, 1),
        ({"targets": ["gate_proj", "up_proj", "down_proj"]}, 1),
    ],
)
def test_blocks_that_cannot_be_fused_are_unchanged(options: dict[str, Any], num_blocks: int) -> None:
    model = make_model(**options)
    model.eval()
    expected = compute(model)
    fuse_blocks(model, num_blocks)
    check_same(compute(model), expected)


def test_generation_is_unchanged() -> None:
    model = make_model()
    model.eval()
    ids = torch.tensor([[3, 5, 7]])
    expected = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    fuse_blocks(model, 2)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=6, do_sample=False), expected)


def test_merge_and_unload_leaves_plain_layers() -> None:
    model = make_model()
    ids = torch.tensor([[3, 5, 7]])
    adapted = model(input_ids=ids).logits
    fuse_blocks(model, 2)
    merged = model.merge_and_unload()
    assert torch.allclose(merged(input_ids=ids).logits, adapted, atol=1e-5)


def test_disabled_adapter_is_not_applied() -> None:
    model = make_model()
    with model.disable_adapter():
        plain = model(input_ids=torch.tensor([[3, 5, 7]])).logits
        fuse_blocks(model, 2)
        assert torch.equal(model(input_ids=torch.tensor([[3, 5, 7]])).logits, plain)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_swiglu_backward_equals_finite_differences(is_gelu: bool) -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(5, 2 * 6, dtype=torch.float64).float()
    gate_up_grad, grad = torch.zeros(5, 12 + 3), torch.randn(5, 6)
    output = torch.empty(5, 6)
    elementwise.swiglu(gate_up, None, output, is_gelu=is_gelu)
    moved = torch.empty(5, 6)
    step = 1e-3 * torch.randn(5, 12)
    elementwise.swiglu(gate_up + step, None, moved, is_gelu=is_gelu)
    expected = float(((moved - output) * grad).sum())
    elementwise.swiglu_backward(grad, gate_up, None, gate_up_grad, is_gelu=is_gelu)
    assert float((gate_up_grad[:, :12] * step).sum()) == pytest.approx(expected, rel=2e-2)
    assert torch.allclose(grad, output)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_triton_kernels_on_a_gpu() -> None:
    from tests.training.kernels.triton_cases import check_all

    check_all("cuda")
