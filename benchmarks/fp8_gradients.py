"""How far gradients of full fine-tuning in FP8 and in BF16 are from FP32, by layer, for a pretrained base.

Needs no GPU: FP8 is emulated. Its reference has the same weights, rounded to FP8, so that only the arithmetic differs.
Prints the largest relative difference among the matrices of the first, second, middle and last layer. A base of 1.5B
takes a few minutes on two CPU cores.

    python benchmarks/fp8_gradients.py --base FOLDER --rows experts/neo4j/sample/train.jsonl --tokens 448
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from launcher.training.model.fp8_blocks import use_fp8_blocks
from launcher.training.model.fp8_linear import use_fp8_linears
from launcher.training.model.fused_lora.reference import use_reference_forward
from launcher.training.model.peft_adapters import cast_embeddings

Grads = dict[int, list[Tensor]]  # of the matrices of each layer


def compute_gradients(model: Any, ids: Tensor, chosen: list[int], *, in_bf16: bool) -> Grads:
    matrices = {
        index: [one for name, one in model.model.layers[index].named_parameters() if name.endswith("proj.weight")]
        for index in chosen
    }
    with torch.autocast("cpu", torch.bfloat16) if in_bf16 else nullcontext():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    grads = iter(torch.autograd.grad(loss, [one for ones in matrices.values() for one in ones]))
    return {index: [next(grads).float() for _ in ones] for index, ones in matrices.items()}


def compare(grads: Grads, exact: Grads) -> dict[int, float]:
    return {
        index: max(float((a - b).norm() / b.norm()) for a, b in zip(grads[index], exact[index], strict=True))
        for index in exact
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of a pretrained base")
    parser.add_argument("--rows", type=Path, required=True, help="text; its beginning is the training sequence")
    parser.add_argument("--tokens", type=int, default=448)
    args = parser.parse_args()
    text = args.rows.read_text(encoding="utf-8")[: 20 * args.tokens]
    ids = AutoTokenizer.from_pretrained(args.base)(text, return_tensors="pt").input_ids[:, : args.tokens]
    model: Any = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    layers = list(model.model.layers)
    chosen = sorted({0, 1, len(layers) // 2, len(layers) - 1})
    exact = compute_gradients(model, ids, chosen, in_bf16=False)
    bf16 = compare(compute_gradients(model, ids, chosen, in_bf16=True), exact)
    use_fp8_linears(layers, torch.bfloat16, compiled=False)
    use_fp8_blocks(layers)
    with use_reference_forward():
        exact = compute_gradients(model, ids, chosen, in_bf16=False)
    cast_embeddings(model, torch.bfloat16)
    fp8 = compare(compute_gradients(model, ids, chosen, in_bf16=True), exact)
    print("| layer | BF16 | FP8 |\n|---|---|---|")
    for index in chosen:
        print(f"| {index} | {bf16[index]:.2f} | {fp8[index]:.2f} |")


if __name__ == "__main__":
    main()
