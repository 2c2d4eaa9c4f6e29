"""Measures LoRA training of each model family at published sizes with random weights: path, speed, memory.

Rank 16 on all linear layers (mixtures of experts: on attention, and on experts), 4 x 2,048 tokens per micro-step,
documents as in training.py. A row of JSON per family has the path that ran (fused blocks or not, CUDA graph or not),
tokens/s, MFU, and peak memory next to the prediction.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    python benchmarks/families.py measure --out families.jsonl            # all families
    python benchmarks/families.py measure --cases gemma-2-2b --out families.jsonl
    python benchmarks/families.py table families.jsonl                    # the table of docs/families.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from resumable_cases import measure_cases, read_rows, run_subcommands  # type: ignore[import-not-found]  # in this folder
from training import Case, measure_case  # type: ignore[import-not-found]  # in this folder

ROWS = 4
STEPS = 12
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _config(
    model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


# The published config.json of a model of 1B to 4B parameters per family; keys that equal the class's default are left
# out, and so are long contexts. Mistral has no model of this size: its entry has the layers of Mistral-7B, but fewer.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _config("llama", 2048, 16, 32, 8, 8192, 128256),
    "qwen3-1.7b": _config("qwen3", 2048, 28, 16, 8, 6144, 151936, head_dim=128),
    "qwen2.5-1.5b": _config("qwen2", 1536, 28, 12, 2, 8960, 151936),
    "mistral-2b": _config(
        "mistral", 4096, 8, 32, 8, 14336, 32768, head_dim=128, sliding_window=4096, tie_word_embeddings=False
    ),
    "gemma-2b": _config("gemma", 2048, 18, 8, 1, 16384, 256000, head_dim=256),
    "gemma-2-2b": _config(
        "gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256
    ),
    "gemma-3-1b": _config(
        "gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256, sliding_window=512, query_pre_attn_scalar=256
    ),
    "gemma-3-4b": _config(  # without its vision tower
        "gemma3_text", 2560, 34, 8, 4, 10240, 262208, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256
    ),
    "phi-3-mini": _config(
        "phi3",
        3072,
        32,
        32,
        32,
        8192,
        32064,
        sliding_window=2047,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    ),
    "phi-4-mini": _config(
        "phi3", 3072, 32, 24, 8, 8192, 200064, partial_rotary_factor=0.75, original_max_position_embeddings=4096
    ),
    "olmo-2-1b": _config("olmo2", 2048, 16, 16, 16, 8192, 100352, tie_word_embeddings=False),
    "smollm3-3b": _config("smollm3", 2048, 36, 16, 4, 11008, 128256),
    "granite-3.3-2b": _config(
        "granite",
        2048,
        40,
        32,
        8,
        8192,
        49159,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
}
# Mixtures of experts: the layers of Qwen3-30B-A3B and gpt-oss-20b, but six of them.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": _config(
        "qwen3_moe",
        2048,
        6,
        32,
        4,
        6144,
        151936,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "gpt-oss": _config(
        "gpt_oss",
        2880,
        6,
        64,
        8,
        2880,
        201088,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        tie_word_embeddings=False,
    ),
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = [
    *(
        Case(name=name, base="", micro_batch_size=ROWS, num_steps=STEPS, more={"target_modules": "all-linear"})
        for name in CONFIGS
    ),
    *(
        Case(name=name, base="", micro_batch_size=ROWS, num_steps=STEPS, more={"target_modules": ATTENTION})
        for name in MIXTURES
    ),
    Case(
        name="qwen3-moe, experts",
        base="",
        micro_batch_size=1,
        num_steps=STEPS,
        more={"target_modules": ATTENTION, "target_parameters": EXPERTS},
    ),
]


def find_config(case: Case) -> dict[str, Any]:
    return {**CONFIGS, **MIXTURES}[case.name.split(",")[0]]


def measure_family(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        base.mkdir()
        (base / "config.json").write_text(json.dumps(find_config(case)))
        result: dict[str, Any] = measure_case(replace(case, base=str(base)))
    return {"config": find_config(case), **result}


def run_measure(args: argparse.Namespace) -> None:
    chosen = [case for name in args.cases for case in CASES if name in (case.name, "all")]
    names = ("tokens_per_second", "mfu", "peak_gib", "predicted_gib", "path", "attention", "cuda_graph", "graphs")
    measure_cases(chosen, args, measure_family, names)


def run_table(args: argparse.Namespace) -> None:
    print("| model | path | attention | CUDA graph | tokens/s | MFU | peak GiB | predicted |")
    print("|---|---|---|---|---|---|---|---|")
    for row in read_rows(args.rows):
        if "error" in row:
            print(f"| {row['case']} | {row['error'][:60]} | | | | | | |")
            continue
        print(
            f"| {row['case']} | {row['path']} | {row['attention']} | {'yes' if row['cuda_graph'] else 'no'} | "
            f"{row['tokens_per_second']:,} | {(row['mfu'] or 0) * 100:.1f} % | {row['peak_gib']} | "
            f"{row['predicted_gib']} |"
        )


if __name__ == "__main__":
    run_subcommands(__doc__, ["all"], f"all, or: {', '.join(case.name for case in CASES)}", run_measure, run_table)
