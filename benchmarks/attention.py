"""Speed of attention over packed documents on a GPU: each backend, and tile sizes of our own kernels.

Heads of Qwen3 (0.6B: 16 query and 8 KV heads; 8B: 32 and 8) and Qwen2.5 (0.5B: 14 and 2), documents of log-normal
lengths (mean 350 tokens; short 100, long 1,200) in sequences of 2,048, BF16. Medians of replayed CUDA graphs. Each
backend is first compared with plain FP32 attention, and run twice to check that its gradients are deterministic.

    python benchmarks/attention.py measure --out attention.jsonl            # backends
    python benchmarks/attention.py measure --cases tiles --out tiles.jsonl  # tile sizes of our kernels
    python benchmarks/attention.py table attention.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from resumable_cases import add_row, iterate_unmeasured, read_rows, run_subcommands  # type: ignore[import-not-found]  # in this folder

from launcher.bench.attention import AttentionSpec
from launcher.bench.workers.attention import REPEATS, capture, make_inputs, measure_backend, time_call
from launcher.core.choices import AttentionBackend
from launcher.plan.calibration import AttentionShape
from launcher.training.model.attention import BACKENDS

# Query heads, KV heads, head_dim, sequences, mean tokens per document.
SHAPES = {
    "0.6B-16": (16, 8, 128, 16, 350),
    "0.6B-2": (16, 8, 128, 2, 350),
    "0.6B-16-short": (16, 8, 128, 16, 100),
    "0.6B-16-long": (16, 8, 128, 16, 1200),
    "8B-4": (32, 8, 128, 4, 350),
    "0.5B-16": (14, 2, 64, 16, 350),
}
NAMES: tuple[AttentionBackend, ...] = ("varlen", "flash_attention_4", "triton")
# Four warps hold a tile of 64 rows: of queries, or of keys for dK/dV.
BY_ROWS = [(64, keys, 4, stages) for keys in (32, 64) for stages in (2, 3, 4)]
BY_ROWS += [(128, 64, 8, stages) for stages in (2, 3)]
BY_KEYS = [(rows, 64, 4, stages) for rows in (32, 64) for stages in (2, 3, 4)]
BY_KEYS += [(64, 128, 8, stages) for stages in (2, 3)]
CANDIDATES = {"forward": BY_ROWS, "queries": BY_ROWS, "keys": BY_KEYS}
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: str
    backend: AttentionBackend
    kernel: str = ""  # of our own, whose tile size is measured
    tile: tuple[int, int, int, int] = (0, 0, 0, 0)


BACKEND_CASES = [Case(f"{shape} {name}", shape, name) for shape, name in product(SHAPES, NAMES)]
TILE_CASES = [
    Case(f"{shape} {kernel} {'x'.join(map(str, tile))}", shape, "triton", kernel, tile)
    for shape in ("0.5B-16", "0.6B-16", "8B-4")
    for kernel, tiles in CANDIDATES.items()
    for tile in tiles
]


def make_spec(case: Case) -> AttentionSpec:
    num_heads, num_kv_heads, head_dim, num_sequences, mean_tokens = SHAPES[case.shape]
    return AttentionSpec(
        backend=case.backend,
        shape=AttentionShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="bf16"),
        num_sequences=num_sequences,
        sequence_length=2048,
        mean_tokens=mean_tokens,
    )


def measure_case(case: Case) -> dict[str, Any]:
    timing = measure_backend(make_spec(case), DEVICE)
    return {
        "forward_ms": timing.forward_ms,
        "backward_ms": timing.backward_ms,
        "differences": [timing.difference],
        "same_twice": timing.is_deterministic,
    }


def measure_tile(case: Case) -> dict[str, Any]:
    from launcher.training.kernels.varlen_attention import (
        TILES,
        AttentionInputs,
        ScoreOptions,
        Tile,
        compute_dkdv,
        compute_dq,
        compute_output,
    )

    made = make_inputs(make_spec(case), DEVICE)
    metadata = BACKENDS["triton"].build_metadata(made.batch)
    q, k, v = (tensor.detach().transpose(1, 2).flatten(0, 1) for tensor in made.heads)
    head_dim = q.shape[-1]
    options = ScoreOptions(sm_scale=head_dim**-0.5)
    inputs = AttentionInputs(q, k, v, metadata["doc_starts"], metadata["doc_ends"], options)
    do, tile, tiles = made.grad.flatten(0, 1), Tile(*case.tile), TILES[head_dim]
    o, lse = compute_output(inputs, tiles.forward)
    _, delta = compute_dq(inputs, o, do, lse, tiles.dq)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: compute_output(inputs, tile),
        "queries": lambda: compute_dq(inputs, o, do, lse, tile),
        "keys": lambda: compute_dkdv(inputs, do, lse, delta, tile),
    }
    call = capture(calls[case.kernel])
    return {"ms": statistics.median(time_call(call, DEVICE) for _ in range(REPEATS))}


def measure(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU: these kernels do not run on a CPU")
    groups = {"backends": BACKEND_CASES, "tiles": TILE_CASES}
    for case in iterate_unmeasured([case for name in args.cases for case in groups[name]], args.out, args.minutes):
        try:
            row = measure_tile(case) if case.kernel else measure_case(case)
        except Exception as error:  # a tile does not fit, or a package is missing
            row = {"missing": f"{type(error).__name__}: {error}"[:200]}
        torch.cuda.synchronize()
        row = {"case": case.name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **row}
        print(row, flush=True)
        add_row(args.out, row)


def table(args: argparse.Namespace) -> None:
    rows = read_rows(args.rows)
    tiles = sorted((row for row in rows if "ms" in row), key=lambda row: (row["case"].split()[:2], row["ms"]))
    for row in tiles:
        print(f"{row['case']:<36}{row['ms']:8.3f} ms")
    backends = [row for row in rows if "forward_ms" in row]
    if backends:
        print("| | forward ms | backward ms | differs | twice the same |\n|---|---|---|---|---|")
    for row in backends:
        numbers = f"{row['forward_ms']:.3f} | {row['backward_ms']:.3f} | {max(row['differences']):.4f}"
        print(f"| {row['case']} | {numbers} | {'yes' if row['same_twice'] else 'no'} |")


if __name__ == "__main__":
    run_subcommands(__doc__, ["backends"], "backends, tiles", measure, table)
