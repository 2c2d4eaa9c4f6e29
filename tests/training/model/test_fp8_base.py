"""Frozen bases in FP8 against transformers' and PEFT's own code with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launcher.core.errors import RunFailedError
from launcher.plan.model import Plan
from launcher.training.kernels import fp8
from launcher.training.model.fused_lora import fp8_base
from launcher.training.model.fused_lora.decoder_layer import fuse_decoder_layers, list_fusable_blocks
from launcher.training.model.fused_lora.fp8_base import Fp8Linear, round_linears, round_remaining
from launcher.training.model.fused_lora.linear import unfuse
from launcher.training.model.fused_lora.reference import use_reference_forward
from launcher.training.model.layer_path import describe_path
from launcher.training.verify import lora_grads
from tests.training.model.test_fused_lora_linear import (
    check_same,
    compute,
    fuse,
    get_layers,
    make_model,
    use_same_dropout_mask,
)

LARGEST_ERROR = 2.0**-4  # of rounding to three bits of mantissa


@pytest.fixture
def exact_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep codes in FP32, so that everything but the rounding is tested exactly."""
    monkeypatch.setattr(fp8, "DTYPE", torch.float32)
    monkeypatch.setattr(fp8_base, "DTYPE", torch.float32)


def fuse_in_fp8(model: Any, *, with_blocks: bool) -> Any:
    layers = get_layers(model)
    plain = list_fusable_blocks(layers) if with_blocks else []
    fused = fuse(model, include_plain=plain, in_fp8=True)
    if with_blocks:
        fuse_decoder_layers(layers)
    round_remaining(layers)
    return fused


@pytest.mark.usefixtures("exact_codes")
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("with_blocks", [False, True])
def test_without_rounding_the_gradients_are_those_of_peft(
    family: str, dora: bool, dropout: float, with_blocks: bool
) -> None:
    model = make_model(dora=dora, dropout=dropout, family=family)
    use_same_dropout_mask(model)
    model.train()
    expected = compute(model)
    fuse_in_fp8(model, with_blocks=with_blocks)
    assert describe_path(get_layers(model)) == ("blocks" if with_blocks else "matmuls")
    check_same(compute(model), expected, 2e-5)
    with use_reference_forward():
        check_same(compute(model), expected, 2e-5)


@pytest.mark.usefixtures("exact_codes")
@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj"], ["k_proj", "up_proj", "down_proj"], ["gate_proj", "down_proj"]]
)
@pytest.mark.parametrize("dora", [False, True])
def test_layers_without_an_adapter_are_in_fp8_too(targets: list[str], dora: bool) -> None:
    model = make_model(targets=targets, dora=dora)
    expected = compute(model)
    fuse_in_fp8(model, with_blocks=True)
    linears = [module for layer in get_layers(model) for module in layer.modules() if isinstance(module, nn.Linear)]
    kinds = {type(module) for module in linears if module.out_features > 4 and module.in_features > 4}  # not A and B
    assert kinds == {Fp8Linear}
    check_same(compute(model), expected, 2e-5)


@pytest.mark.usefixtures("exact_codes")
def test_unfused_layers_keep_the_fp8_base() -> None:
    model = make_model()
    expected = compute(model)
    unfuse(fuse_in_fp8(model, with_blocks=False))
    check_same(compute(model), expected, 2e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_rounding_changes_gradients_by_a_few_percent(dora: bool) -> None:
    model = make_model(dora=dora)
    names = list(dict(model.named_parameters()))
    fuse_in_fp8(model, with_blocks=True)
    loss, grads = compute(model)
    with use_reference_forward():
        expected_loss, expected = compute(model)
    assert float(loss) == pytest.approx(float(expected_loss), rel=0.01)
    error = sum(float((grads[name] - expected[name]).square().sum()) for name in expected)
    total = sum(float(grad.square().sum()) for grad in expected.values())
    assert 0 < (error / total) ** 0.5 < 0.2
    trained = [name for name in names if "lora_" in name]
    assert [name for name, _ in model.named_parameters() if "lora_" in name] == trained


def test_weights_are_rounded_row_by_row() -> None:
    torch.manual_seed(0)  # the row with large weights makes up most of the output and of its error
    layers: list[Any] = [nn.Linear(32, 48, bias=False), nn.Linear(32, 16)]
    with torch.no_grad():
        layers[0].weight[3] *= 1000
        layers[1].weight[5] = 0
    originals = [layer.weight.detach().clone() for layer in layers]
    for layer in layers:
        layer.requires_grad_(False)
    x = torch.randn(7, 32)
    expected = [layer(x) for layer in layers]
    codes, scales = round_linears(layers)
    assert codes.dtype == torch.float8_e4m3fn
    assert layers[1].codes.data_ptr() == codes[48:].data_ptr()
    assert float(scales[48 + 5]) == 1.0  # a gradient is divided by it
    for layer, original, y in zip(layers, originals, expected, strict=True):
        error = (layer.weight - original).abs() / original.abs().amax(dim=1, keepdim=True).clamp(min=1e-9)
        assert float(error.max()) <= LARGEST_ERROR
        assert float((layer(x) - y).norm() / y.norm()) < 0.06
        assert "weight" not in dict(layer.named_parameters())


def test_sizes_that_tensor_cores_cannot_load_stay_as_they_are() -> None:
    layer = nn.Linear(24, 40).requires_grad_(False)
    assert round_remaining([nn.Sequential(layer)]) == 0
    assert type(layer) is nn.Linear


def test_rows_without_a_gradient_do_not_disturb_the_others() -> None:
    """Tokens of the prompt have no gradient in the last layer."""
    grad = torch.randn(40, 64) * 1e-6
    grad[10:30] = 0
    scales, x_lora = 0.5 + torch.rand(64), torch.randn(40, 8)
    rows = fp8.quantize_rows(grad, scales)
    assert float(rows.scales.max()) < 1e-6
    assert not rows.scales[10:30].any()
    b_grad = fp8.lora_B_grad(rows, x_lora, scales)
    assert float((b_grad - grad.t() @ x_lora).norm() / (grad.t() @ x_lora).norm()) < 0.06


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_gradients_far_from_fp32_end_the_run(plan: Plan, difference: float) -> None:
    with pytest.raises(RunFailedError, match=r"with FP8, gradients differ from FP32 .* more than 0\.4"):
        lora_grads._check_fp8(plan, difference)
    assert lora_grads._check_fp8(plan, 0.3) == 0.3
