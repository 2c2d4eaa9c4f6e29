"""Decode steps of `launcher eval`: milliseconds per step, with and without our CUDA graph and attention kernel.

Random weights with a LoRA adapter of rank 16 on all linear layers; prompts of several lengths, padded on the left. A
row of JSON per variant has the time per step, peak memory, and with --profile the kernels that take most of a step.

    python benchmarks/generation.py --out generation.jsonl
    python benchmarks/generation.py --cases smollm2-135m --batch-size 64 --prompt 2000 --profile --out generation.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from launcher.core.units import bytes_to_gib
from launcher.training.inference import graphed_decoding
from launcher.training.kernels.availability import supports_triton
from launcher.training.runtime.run_record import collect_versions

# (model type, hidden size, layers, heads, KV heads, intermediate size, vocabulary)
CASES = {
    "smollm2-135m": ("llama", 576, 30, 9, 3, 1536, 49152),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 8960, 151936),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 12288, 151936),
}
VARIANTS = "eager", "graph, SDPA", "graph, own attention"
NUM_KERNELS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["smollm2-135m", "qwen2.5-1.5b"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the longest prompt; the shortest has half")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, help="fewer layers, to try the command")
    parser.add_argument("--profile", action="store_true", help="add the kernels that take most time")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for case in args.cases:
        model = make_model(case, args.layers)
        for variant in args.variants:
            row = {"case": case, "variant": variant, **measure(model, variant, args), "versions": collect_versions()}
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps({name: value for name, value in row.items() if name != "versions"}), flush=True)


def make_model(case: str, num_layers: int | None) -> Any:
    model_type, hidden, layers, heads, kv_heads, intermediate, vocab = CASES[case]
    config = AutoConfig.for_model(
        model_type,
        hidden_size=hidden,
        num_hidden_layers=num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=8192,
    )
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    adapter = LoraConfig(r=16, target_modules="all-linear")
    return get_peft_model(model, adapter, autocast_adapter_dtype=False).get_base_model().eval()


def measure(model: Any, variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """Generate twice, the first time to compile kernels, and return the time per step of the second."""
    generate(model, variant, args, 4)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    prefill = generate(model, variant, args, 4)
    seconds = generate(model, variant, args, args.new_tokens) - prefill
    row: dict[str, Any] = {
        "batch_size": args.batch_size,
        "prompt": args.prompt,
        "milliseconds_per_step": round(1000 * seconds / (args.new_tokens - 4), 2),
        "prefill_seconds": round(prefill, 2),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if torch.cuda.is_available():
        row["peak_gib"] = round(bytes_to_gib(torch.cuda.max_memory_allocated()), 2)
    if args.profile:
        row["kernels"] = list_kernels(lambda: generate(model, variant, args, 36), 32)
    return row


def generate(model: Any, variant: str, args: argparse.Namespace, num_tokens: int) -> float:
    """Return the seconds of one call of `generate`."""
    device = model.device
    ids = torch.randint(3, 1000, (args.batch_size, args.prompt), device=device)
    padding = torch.linspace(0, args.prompt // 2, args.batch_size, device=device)
    mask = (torch.arange(args.prompt, device=device) >= padding[:, None]).long()
    config = GenerationConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0, eos_token_id=2)
    with torch.inference_mode(), use_variant(model, variant):
        cache = None
        if variant != "eager":
            cache = graphed_decoding.make_static_cache(model, args.prompt + args.new_tokens, config)
        began = time.monotonic()
        model.generate(input_ids=ids, attention_mask=mask, generation_config=config, past_key_values=cache)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.monotonic() - began


@contextmanager
def use_variant(model: Any, variant: str) -> Iterator[None]:
    own = variant == "graph, own attention"
    with (
        mock.patch.object(graphed_decoding, "supports_triton", lambda device: own and supports_triton(device)),
        graphed_decoding.graphed_decoding(model),
    ):
        yield


def list_kernels(run: Callable[[], object], num_steps: int) -> list[tuple[str, float, float]]:
    """Return name, milliseconds per step and calls per step of the slowest kernels; the prefill is included."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        run()
    attribute = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: getattr(event, attribute), reverse=True)
    return [
        (event.key[:60], round(getattr(event, attribute) / 1000 / num_steps, 3), round(event.count / num_steps, 1))
        for event in events[:NUM_KERNELS]
    ]


if __name__ == "__main__":
    main()
