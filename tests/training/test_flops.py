"""The plan's count of work for a token, held to torch's own counter of what a forward and a backward pass compute.

What the formula leaves out on purpose is written out here, and then both must agree to the last product: an adapter's
own products, the gradient that the first layer's input does not need, and half of what eager attention computes, which
a causal kernel passes over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from launcher.base_models.shapes import ModelShape, make_shape
from launcher.core.choices import AdapterKind
from launcher.plan.estimate.step_time import Workload, compute_flops_per_token
from tests.conftest import ROOT

NUM_TOKENS = 48
RANK = 4
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "tiny": AutoConfig.from_pretrained(ROOT / "launcher/base_models/tiny_base"),  # Qwen3: GQA, tied head
    "untied": LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=False),
    "grouped": LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "biased": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
}


def shape_of(config: PretrainedConfig) -> ModelShape:
    return make_shape(config.to_dict(), "counted", "config")


def build(config: PretrainedConfig, adapter: AdapterKind) -> Any:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if adapter == "lora":
        model.requires_grad_(False)
        names = list(shape_of(config).linear_names)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=8, target_modules=names))
    return model.train()


def count(model: Any, num_trained: int = NUM_TOKENS) -> dict[str, int]:
    """One document; of its positions the last ones pass through the head, as in PackedCausalLM."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ids = torch.randint(1, base.config.vocab_size, (1, NUM_TOKENS))
    with FlopCounterMode(display=False) as counter:
        hidden: Tensor = base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = base.get_output_embeddings()(hidden[NUM_TOKENS - num_trained :])
        functional.cross_entropy(logits, ids[0, NUM_TOKENS - num_trained :]).backward()
    counts = counter.get_flop_counts()["Global"]
    return {"products": sum(v for k, v in counts.items() if "bmm" not in str(k)), "attention": _attention(counts)}


def _attention(counts: dict[Any, int]) -> int:
    return sum(value for key, value in counts.items() if "bmm" in str(key))


def formula(config: PretrainedConfig, adapter: AdapterKind, trained_share: float = 1.0) -> dict[str, float]:
    """FLOPs of matmuls with weights, and of attention."""
    work = Workload(
        shape=shape_of(config),
        adapter=adapter,
        quantization="none",
        compute_dtype="fp32",
        compiled=False,
        checkpointing="none",
        document_tokens=0.0,
        trained_share=trained_share,
    )
    products = NUM_TOKENS * compute_flops_per_token(work)
    reaching = replace(work, document_tokens=float(NUM_TOKENS))
    return {"products": products, "attention": NUM_TOKENS * compute_flops_per_token(reaching) - products}


def left_out(config: PretrainedConfig) -> int:
    """LoRA's matmuls, without the input gradients that the first layer's q, k and v do not need."""
    shape = shape_of(config)
    own = shape.num_layers * sum(RANK * (linear.in_features + linear.out_features) for linear in shape.linears)
    first = [linear for linear in shape.linears if linear.name in ("q_proj", "k_proj", "v_proj")]
    unneeded = sum(linear.in_features * (linear.out_features + RANK) for linear in first)
    return NUM_TOKENS * (6 * own - 2 * unneeded)


@pytest.mark.parametrize("name", CONFIGS)
def test_full_fine_tuning_flops_are_exact(name: str) -> None:
    counted, said = count(build(CONFIGS[name], "full")), formula(CONFIGS[name], "full")
    assert counted["products"] == said["products"]
    assert counted["attention"] == 2 * said["attention"]  # eager: the masked half too


@pytest.mark.parametrize("name", CONFIGS)
def test_adapter_flops_are_exact_up_to_skipped_matmuls(name: str) -> None:
    counted, said = count(build(CONFIGS[name], "lora")), formula(CONFIGS[name], "lora")
    assert counted["products"] == said["products"] + left_out(CONFIGS[name])
    assert counted["attention"] == 2 * said["attention"]


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("num_trained", [1, 12])
def test_only_trained_positions_pass_through_the_head(adapter: AdapterKind, num_trained: int) -> None:
    config = CONFIGS["untied"]
    counted = count(build(config, adapter), num_trained)
    said = formula(config, adapter, num_trained / NUM_TOKENS)
    assert counted["products"] == said["products"] + (left_out(config) if adapter == "lora" else 0)


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_full_checkpointing_costs_less_than_a_forward_pass(adapter: AdapterKind) -> None:
    """The speed model counts a complete forward pass for recomputation; torch computes less.

    It stops once the backward pass has what it needs: neither a layer's last matmul, unless an adapter follows it, nor
    the head is computed again.
    """
    config = CONFIGS["untied"]
    plain, again = build(config, adapter), build(config, adapter)
    recompute(again)
    shape = shape_of(config)
    forward = 2 * NUM_TOKENS * shape.num_layers * sum(one.in_features * one.out_features for one in shape.linears)
    extra = count(again)["products"] - count(plain)["products"]
    last = 2 * NUM_TOKENS * shape.num_layers * config.intermediate_size * config.hidden_size
    if adapter == "full":
        assert extra == forward - last
    else:
        assert forward < extra < 1.2 * forward  # with the adapter's own


def recompute(model: Any) -> None:
    """Checkpoint every layer, as compile_checkpoint.py does."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.get_decoder().layers:
        _wrap(layer)


def _wrap(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda *values, **more: checkpoint(forward, *values, use_reentrant=False, **more)
