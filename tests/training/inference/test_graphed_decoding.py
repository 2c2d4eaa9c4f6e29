"""Decode steps that are replayed give the tokens of plain generation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from launcher.training.inference import graphed_decoding

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "head_dim": 16},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16},
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIG = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=1)
LENGTHS = 12, 5, 1


def make_model(family: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family], initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).to(device).eval()


def generate(model: Any, cache: Any = None) -> list[list[int]]:
    torch.manual_seed(1)
    width = max(LENGTHS)
    ids = torch.randint(2, 64, (len(LENGTHS), width))
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in LENGTHS])
    with torch.inference_mode(), graphed_decoding.graphed_decoding(model):
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=CONFIG,
            **({} if cache is None else {"past_key_values": cache}),
        )
    return out[:, width:].tolist()


def make_cache(model: Any) -> Any:
    return graphed_decoding.make_static_cache(model, max(LENGTHS) + 20, CONFIG)


class FakeGraph:
    """What a CUDA graph does, on a CPU: nothing while it is captured, and the same function at each replay."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        outputs = CausalLMOutputWithPast(logits=torch.FloatTensor(1))

        def replay() -> None:
            self.num_replays += 1
            outputs["logits"] = compute().logits

        return replay, outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = make_model(family), FakeGraph()
    plain = generate(model)
    assert len({tuple(row) for row in plain}) == len(LENGTHS), "else the test shows nothing"
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *_args: True)
    monkeypatch.setattr(graphed_decoding, "_capture_graph", graph.capture)
    assert generate(model, make_cache(model)) == plain
    assert graph.num_replays == 18, "one token by the prefill, one by the step before the capture"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_decode_steps_use_our_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself needs a GPU; here SDPA computes what it gets."""
    model, shapes = make_model(family), []
    plain = generate(model)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        shapes.append((q.shape[2], k.shape[2], *mask.shape))
        mask = mask[:, None, None]
        return functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(1, 2)

    name = "launcher.training.kernels.decode_attention_triton"
    monkeypatch.setitem(sys.modules, name, cast(ModuleType, SimpleNamespace(decode_attention=attend)))
    monkeypatch.setattr(graphed_decoding, "supports_triton", lambda _device: True)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *_args: True)
    monkeypatch.setattr(graphed_decoding, "_capture_graph", FakeGraph().capture)
    assert generate(model, make_cache(model)) == plain
    assert shapes == [(1, 32, 3, 32)] * 19 * SIZES["num_hidden_layers"]
    assert model.config._attn_implementation == "sdpa"


def test_steps_run_directly_if_they_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    plain = generate(model)

    def fail(_compute: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *_args: True)
    monkeypatch.setattr(graphed_decoding, "_capture_graph", fail)
    assert generate(model, make_cache(model)) == plain


def test_a_cpu_has_no_graphs() -> None:
    model = make_model("llama")
    assert make_cache(model) is None
    before = model.get_compiled_call
    with graphed_decoding.graphed_decoding(model):
        assert model.get_compiled_call != before
    assert model.get_compiled_call == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_graph_gives_the_same_tokens_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family, "cuda")
    capture = Mock(side_effect=graphed_decoding._capture_graph)
    monkeypatch.setattr(graphed_decoding, "_capture_graph", capture)
    assert generate(model, make_cache(model)) == generate(model)
    assert capture.call_count == 1
