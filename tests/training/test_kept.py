"""What autograd keeps of a layer, against what memory is planned for it: no GPU is needed to count bytes.

Attention is one that keeps what variable-length kernels do. torch's dropout keeps numbers on a CPU, and bytes on a GPU:
they are counted as on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.choices import Quantization
from launcher.memory.step import _count_layer_bytes
from launcher.shapes import make_shape
from launcher.training.joined import find_joinable, join_layers
from launcher.training.products import Products, lay_out_products
from tests.training.builders import make_recipe
from tests.training.test_products import ALL, find_layers

# Norms of heads are told from others by their size.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 320,
    "vocab_size": 96,
}
NUM_TOKENS = 44  # no multiple of it is the size of anything else
ALLOWED = 0.01  # a few numbers for each head and norm
BF16 = torch.bfloat16
TARGETS = [ALL, [name for name in ALL if name != "gate_proj"], ["q_proj", "v_proj"]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.randn_like(query)  # laid out as it is: token by token
        ctx.save_for_backward(query, key, value, out, torch.zeros(query.shape[1:3]))
        return out

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        raise NotImplementedError


def _attend(_module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **_more: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value).transpose(1, 2), None


@pytest.fixture(autouse=True)
def _known_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "counted", _attend)


def make_model(dora: bool, dropout: float, targets: list[str]) -> Any:
    lora = LoraConfig(r=4, lora_alpha=6, use_dora=dora, lora_dropout=dropout, target_modules=targets)
    return get_peft_model(AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=BF16), lora)


def count_kept_bytes(model: Any, products: Products) -> float:
    """For a token, by the second layer: the first's input needs no gradient."""
    base, layer = model.get_base_model(), find_layers(model)[1]
    x = torch.randn(1, NUM_TOKENS, SIZES["hidden_size"], dtype=BF16, requires_grad=True)
    angles = base.model.rotary_emb(x, torch.arange(NUM_TOKENS)[None])
    standing = {
        one.untyped_storage().data_ptr()
        for one in (*model.parameters(), *angles, *(one for block in products.blocks for one in block.stored))
    }
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(x + 0, position_embeddings=angles)
    assert out is not None
    return sum(_count_bytes(one) for address, one in kept.items() if address not in standing) / NUM_TOKENS


def _count_bytes(tensor: Tensor) -> float:
    num_bytes = tensor.untyped_storage().nbytes()
    if num_bytes % NUM_TOKENS:  # not one for each token: DoRA's scales, seeds
        return 0.0
    is_mask = tensor.is_floating_point() and len(tensor.unique()) == 2 and bool((tensor == 0).any())
    return num_bytes / tensor.element_size() if is_mask else num_bytes


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("targets", TARGETS, ids=["all", "published", "two"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_keeps_what_is_planned(joins: bool, targets: list[str], dora: bool, dropout: float) -> None:
    check_kept(make_model(dora, dropout, targets), targets, dropout, joins=joins, quantization="none")


def check_kept(model: Any, targets: list[str], dropout: float, *, joins: bool, quantization: Quantization) -> None:
    is_dora = prepare(model, dropout)
    layers = find_layers(model)
    products = lay_out_products(layers, BF16, filled=find_joinable(layers) if joins else ())
    products.refresh()
    if joins:
        assert join_layers(layers) == len(layers) * (1 if targets == TARGETS[2] else 2)
    recipe = make_recipe(
        targets,
        adapter="dora" if is_dora else "lora",
        quantization=quantization,
        compute_dtype="bf16",
        base_dtype="bf16",
        attention="varlen",
        sequence_length=NUM_TOKENS,
        micro_batch_size=1,
        on_gpu=joins,
        adapter_dropout=dropout,
    )
    planned = _count_layer_bytes(make_shape(model.config.to_dict(), "qwen3", "config"), recipe)
    assert count_kept_bytes(model, products) == pytest.approx(planned, rel=ALLOWED)


def prepare(model: Any, dropout: float) -> bool:
    """As it is trained. Whether it is DoRA."""
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
