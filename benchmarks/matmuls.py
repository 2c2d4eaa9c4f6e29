"""Speed of the matmuls of a frozen base on a GPU: BF16, our FP8 kernel, torch's FP8, and what FP8 needs besides.

That is rounding the input to FP8, and LoRA's own matmuls with FP8 inputs: x A^T in the forward pass, dy B, dA and dB in
the backward pass (of fused projections; down_proj computes the last three in BF16). Shapes of Qwen3 (0.6B: 16 x 2,048
tokens, 8B: 4 x 2,048), with fused projections as in training and LoRA of rank 16. FP8 is E4M3 with a scale per row.
Medians of replayed CUDA graphs. Each FP8 result is first compared with FP32 products of the rounded values.

    python benchmarks/matmuls.py measure --out matmuls.jsonl
    python benchmarks/matmuls.py table matmuls.jsonl
    python benchmarks/matmuls.py measure --cases tiny --out tiny.jsonl   # without a GPU
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from resumable_cases import measure_cases, read_rows, run_subcommands  # type: ignore[import-not-found]  # in this folder
from torch import Tensor

from launcher.bench.workers.attention import REPEATS, capture, time_call
from launcher.training.kernels import fp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAN_SCALE = DEVICE.type == "cuda"  # torch's FP8 matmul needs tensor cores
TOLERANCE = 0.02  # relative difference; results are rounded to BF16


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    num_inputs: int
    num_outputs: int
    ranks: int = 16  # of the LoRA matrices with this input, together


CASES = [
    Case("0.6B q, k, v", 32768, 1024, 4096, 48),
    Case("0.6B gate, up", 32768, 1024, 6144, 32),
    Case("0.6B down", 32768, 3072, 1024),
    Case("8B q, k, v", 8192, 4096, 6144, 48),
    Case("8B gate, up", 8192, 4096, 24576, 32),
    Case("8B down", 8192, 12288, 4096),
]
TINY = Case("tiny", 64, 32, 48)


def measure(case: Case) -> dict[str, Any]:
    """Return the milliseconds of each kind of matmul, and the largest relative difference of FP8 from FP32 products."""
    torch.manual_seed(0)
    x = torch.randn(case.num_tokens, case.num_inputs, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(case.num_outputs, case.num_inputs, device=DEVICE, dtype=torch.bfloat16)
    rows, columns = fp8.quantize_rows(x), fp8.quantize_rows(weight)
    grad_rows = fp8.quantize_rows(x.new_empty(case.num_tokens, case.num_outputs).normal_(), columns.scales)
    lora_a = torch.randn(case.ranks, case.num_inputs, device=DEVICE, dtype=torch.bfloat16)
    grad_b = torch.randn(case.num_outputs, case.ranks, device=DEVICE, dtype=torch.bfloat16)
    x_lora = fp8.project_rows(rows, lora_a)

    def multiply() -> Tensor:
        return fp8.matmul(rows, columns.codes, columns.scales, torch.bfloat16, None)

    def multiply_with_torch() -> Tensor:
        return torch._scaled_mm(
            rows.codes,
            columns.codes.t(),
            scale_a=rows.scales[:, None],
            scale_b=columns.scales[None, :],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def multiply_lora_backward() -> tuple[Tensor, Tensor]:
        grad_lora = fp8.project_grad_rows(grad_rows, grad_b)
        return fp8.lora_A_grad(rows, grad_lora), fp8.lora_B_grad(grad_rows, x_lora, columns.scales)

    calls: dict[str, Callable[[], Any]] = {
        "bf16_ms": lambda: x @ weight.t(),
        "fp8_ms": multiply,
        "rounding_ms": lambda: fp8.quantize_rows(x),
        "lora_forward_ms": lambda: fp8.project_rows(rows, lora_a),
        "lora_backward_ms": multiply_lora_backward,
    }
    if CAN_SCALE:
        calls["torch_fp8_ms"] = multiply_with_torch
    shown = slice(0, 64)  # rows that are compared
    exact = (rows.codes[shown].float() @ columns.codes.float().t()) * rows.scales[shown, None] * columns.scales
    difference = float((multiply()[shown].float() - exact).norm() / exact.norm())
    if not difference < TOLERANCE:
        raise RuntimeError(f"FP8 differs from FP32 by {difference:.3f}")
    row: dict[str, Any] = {"shape": [case.num_tokens, case.num_inputs, case.num_outputs], "difference": difference}
    for name, call in calls.items():
        timed = capture(call) if DEVICE.type == "cuda" else call
        row[name] = round(statistics.median(time_call(timed, DEVICE) for _ in range(REPEATS)), 4)
    return row | {"tflops": round(2 * case.num_tokens * case.num_inputs * case.num_outputs / row["fp8_ms"] / 1e9)}


def run_measure(args: argparse.Namespace) -> None:
    chosen = [case for case in (*CASES, TINY) if case.name in args.cases]
    measure_cases(chosen, args, measure, ("bf16_ms", "fp8_ms", "rounding_ms", "lora_forward_ms", "lora_backward_ms"))


def run_table(args: argparse.Namespace) -> None:
    columns = ["product", "tokens x in x out", "BF16 ms", "FP8 ms", "gain", "TFLOPS", "torch's FP8 ms"]
    columns += ["rounding the input, ms", "LoRA, forward, ms", "LoRA, backward, ms"]
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    for row in read_rows(args.rows):
        if "error" not in row:
            shape = " x ".join(f"{size:,}" for size in row["shape"])
            gain = f"{row['bf16_ms'] / row['fp8_ms']:.2f}"
            cells = [row["case"], shape, row["bf16_ms"], row["fp8_ms"], gain, f"{row['tflops']:,}"]
            cells += [row.get("torch_fp8_ms", ""), row["rounding_ms"], row["lora_forward_ms"], row["lora_backward_ms"]]
            print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    run_subcommands(__doc__, [case.name for case in CASES], "names of products", run_measure, run_table)
