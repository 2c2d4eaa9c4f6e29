"""What autograd saves for a layer, against the memory estimate. Counting bytes needs no GPU.

The attention here saves what variable-length kernels save. torch's dropout saves a float mask on a CPU and a byte mask
on a GPU: masks are counted as on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.base_models.shapes import make_shape
from launcher.core.choices import Quantization
from launcher.plan.estimate.memory.step import _count_layer_bytes, _count_saved_weight_bytes
from launcher.training.model.fp8_blocks import use_fp8_blocks
from launcher.training.model.fp8_linear import use_fp8_linears
from launcher.training.model.fused_lora.decoder_layer import fuse_decoder_layers, list_fusable_blocks
from launcher.training.model.fused_lora.linear import FusedLoraModel, fuse_lora_layers
from tests.training.builders import make_recipe
from tests.training.model.test_fused_lora_linear import ALL, get_layers

# Different sizes, so that QK-norms are distinguishable from other norms.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 320,
    "vocab_size": 96,
}
NUM_TOKENS = 22  # no other size is a multiple of it
ALLOWED = 0.01  # relative; a few values per head and norm
BF16 = torch.bfloat16
TARGETS = [ALL, [name for name in ALL if name != "gate_proj"], ["q_proj", "v_proj"]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.randn_like(query)  # the same memory layout as the query
        ctx.save_for_backward(query, key, value, out, torch.zeros(query.shape[1:3]))
        return out

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        raise NotImplementedError


def _attend(_module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **_more: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value).transpose(1, 2), None


@pytest.fixture(autouse=True)
def _counted_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "counted", _attend)


def make_model(dora: bool, dropout: float, targets: list[str]) -> Any:
    lora = LoraConfig(r=4, lora_alpha=6, use_dora=dora, lora_dropout=dropout, target_modules=targets)
    return get_peft_model(AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=BF16), lora)


def count_saved_bytes(model: Any, fused_model: FusedLoraModel) -> float:
    """Return bytes per token of the second layer; the input of the first needs no gradient."""
    stored = [one for weights in fused_model.weights for one in weights.stored]
    return count_layer_bytes(model.get_base_model(), [*model.parameters(), *stored])


def count_layer_bytes(base: Any, weights: list[Tensor]) -> float:
    layer = base.model.layers[1]
    x = torch.randn(1, NUM_TOKENS, SIZES["hidden_size"], dtype=BF16, requires_grad=True)
    cos_sin = base.model.rotary_emb(x, torch.arange(NUM_TOKENS)[None])
    permanent = {one.untyped_storage().data_ptr() for one in (*weights, *cos_sin)}
    saved: dict[int, Tensor] = {}

    def record(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        out = layer(x + 0, position_embeddings=cos_sin)
    assert out is not None
    return sum(_count_bytes(one) for address, one in saved.items() if address not in permanent) / NUM_TOKENS


def _count_bytes(tensor: Tensor) -> float:
    num_bytes = tensor.untyped_storage().nbytes()
    if num_bytes % NUM_TOKENS:  # not per token: DoRA's scales, seeds
        return 0.0
    is_mask = tensor.is_floating_point() and len(tensor.unique()) == 2 and bool((tensor == 0).any())
    return num_bytes / tensor.element_size() if is_mask else num_bytes


@pytest.mark.parametrize("fuses_blocks", [False, True])
@pytest.mark.parametrize("targets", TARGETS, ids=["all", "published", "two"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layer_saves_the_estimated_bytes(fuses_blocks: bool, targets: list[str], dora: bool, dropout: float) -> None:
    check_saved_bytes(
        make_model(dora, dropout, targets), targets, dropout, fuses_blocks=fuses_blocks, quantization="none"
    )


def check_saved_bytes(
    model: Any, targets: list[str], dropout: float, *, fuses_blocks: bool, quantization: Quantization
) -> None:
    is_dora = prepare(model, dropout)
    layers = get_layers(model)
    fused_model = fuse_lora_layers(layers, BF16, include_plain=list_fusable_blocks(layers) if fuses_blocks else ())
    fused_model.refresh()
    if fuses_blocks:
        assert fuse_decoder_layers(layers) == len(layers) * (1 if targets == TARGETS[2] else 2)
    recipe = make_recipe(
        targets,
        adapter="dora" if is_dora else "lora",
        quantization=quantization,
        compute_dtype="bf16",
        base_dtype="bf16",
        attention="varlen",
        sequence_length=NUM_TOKENS,
        micro_batch_size=1,
        on_gpu=fuses_blocks,
        adapter_dropout=dropout,
    )
    planned = _count_layer_bytes(make_shape(model.config.to_dict(), "qwen3", "config"), recipe)
    assert count_saved_bytes(model, fused_model) == pytest.approx(planned, rel=ALLOWED)


def prepare(model: Any, dropout: float) -> bool:
    """Set dtypes, dropout and attention as in training; return whether the adapter is DoRA."""
    adapted = [module for module in model.modules() if hasattr(module, "lora_dropout")]
    for module in adapted:
        if dropout:
            module.lora_dropout["default"] = nn.Dropout(dropout)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.get_base_model().config._attn_implementation = "counted"
    model.train()
    return bool(adapted[0].lora_variant)


@pytest.mark.parametrize(
    ("dtype", "in_fp8"), [(torch.float32, True), (BF16, True), (BF16, False)], ids=["fp8", "fp8, bf16 weights", "bf16"]
)
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "qwen2", "olmo2", "gemma", "gemma2", "smollm3", "granite"])
def test_fully_trained_layer_saves_the_estimated_bytes(model_type: str, dtype: torch.dtype, in_fp8: bool) -> None:
    config = AutoConfig.for_model(model_type, **SIZES, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layers = list(model.model.layers)
    if in_fp8:
        use_fp8_linears(layers, BF16, compiled=False)
        assert use_fp8_blocks(layers) == (0 if model_type == "olmo2" else 4)
    model.config._attn_implementation = "counted"
    recipe = make_recipe(
        [],
        adapter="full",
        rank=None,
        compute_dtype="bf16",
        base_dtype="fp32" if dtype == torch.float32 else "bf16",
        trainable_dtype="fp32" if dtype == torch.float32 else "bf16",
        fp8_layers=in_fp8,
        attention="varlen",
        sequence_length=NUM_TOKENS,
        micro_batch_size=1,
    )
    shape = make_shape(model.config.to_dict(), model_type, "config")
    with torch.autocast("cpu", BF16, enabled=dtype == torch.float32):
        saved = count_layer_bytes(model, list(model.parameters()))
    assert saved == pytest.approx(_count_layer_bytes(shape, recipe), rel=ALLOWED)


@pytest.mark.parametrize("stacks", [(), ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")], ids=["frozen", "lora"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_layer_of_experts_saves_the_estimated_bytes(model_type: str, stacks: tuple[str, ...]) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 320}
    config = AutoConfig.for_model(model_type, **{**SIZES, **experts})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(r=4, lora_alpha=6, target_modules=targets, target_parameters=list(stacks))
    model: Any = get_peft_model(AutoModelForCausalLM.from_config(config, dtype=BF16), lora)
    prepare(model, 0.0)
    fused_model = fuse_lora_layers(get_layers(model), BF16, include_plain=())
    fused_model.refresh()
    recipe = make_recipe(
        targets,
        target_parameters=stacks,
        compute_dtype="bf16",
        base_dtype="bf16",
        attention="varlen",
        sequence_length=NUM_TOKENS,
        micro_batch_size=1,
    )
    shape = make_shape(model.config.to_dict(), model_type, "config")
    assert count_saved_bytes(model, fused_model) == pytest.approx(_count_layer_bytes(shape, recipe), rel=0.05)
    copies = sum(p.numel() for name, p in get_layers(model)[0].named_parameters() if name.endswith("_proj"))
    assert _count_saved_weight_bytes(shape, recipe) == (2 * copies if stacks else 0)
