"""Attention over packed documents by itself, on a GPU: each backend, and the tiles of our own kernels.

Heads of Qwen3 (0.6B: 16 that share 8 keys; 8B: 32 that share 8) and of Qwen2.5 (0.5B: 14 that share 2), documents of
log-normal lengths (mean 350 tokens; short 100, long 1,200) in sequences of 2,048, BF16. Medians of graphs replayed.
Each backend is held to plain attention in FP32 first, and asked whether it gives the same gradients twice.

    python benchmarks/attention.py measure --out attention.jsonl            # backends
    python benchmarks/attention.py measure --cases tiles --out tiles.jsonl  # tiles of our own
    python benchmarks/attention.py table attention.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pieces import add_row, iterate_left, read_rows, run_verbs  # type: ignore[import-not-found]  # beside this file
from torch import Tensor

from launcher.choices import AttentionBackend
from launcher.training.attention import BACKENDS, Backend
from launcher.training.batches import PackedBatch, collate, make_shape
from launcher.training.bench.documents import write_random_store
from launcher.training.grouped import attend_eager, describe_groups, in_groups

# Heads, key heads, features of a head, sequences, mean tokens of a document.
SHAPES = {
    "0.6B-16": (16, 8, 128, 16, 350),
    "0.6B-2": (16, 8, 128, 2, 350),
    "0.6B-16-short": (16, 8, 128, 16, 100),
    "0.6B-16-long": (16, 8, 128, 16, 1200),
    "8B-4": (32, 8, 128, 4, 350),
    "0.5B-16": (14, 2, 64, 16, 350),
}
NAMES: tuple[AttentionBackend, ...] = ("varlen", "flash_attention_4", "triton")
# Four warps hold 64 rows of a product: of rows, or of keys where the keys' gradients are made.
BY_ROWS = [(64, keys, 4, stages) for keys in (32, 64) for stages in (2, 3, 4)]
BY_ROWS += [(128, 64, 8, stages) for stages in (2, 3)]
BY_KEYS = [(rows, 64, 4, stages) for rows in (32, 64) for stages in (2, 3, 4)]
BY_KEYS += [(64, 128, 8, stages) for stages in (2, 3)]
TRIED = {"forward": BY_ROWS, "queries": BY_ROWS, "keys": BY_KEYS}
REPEATS, CALLS = 7, 10


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: str
    backend: AttentionBackend
    kernel: str = ""  # of our own, whose tile is tried
    tile: tuple[int, int, int, int] = (0, 0, 0, 0)


BACKEND_CASES = [Case(f"{shape} {name}", shape, name) for shape, name in product(SHAPES, NAMES)]
TILE_CASES = [
    Case(f"{shape} {kernel} {'x'.join(map(str, tile))}", shape, "triton", kernel, tile)
    for shape in ("0.5B-16", "0.6B-16", "8B-4")
    for kernel, tiles in TRIED.items()
    for tile in tiles
]


def make_batch(num_sequences: int, mean_tokens: int) -> PackedBatch:
    with tempfile.TemporaryDirectory() as folder:
        store = write_random_store(
            Path(folder), num_packs=num_sequences, sequence_length=2048, vocab_size=1000, mean_tokens=mean_tokens
        )
        file = store.open_split("train")
        shape = make_shape(file.count("document_lengths"), num_sequences, 2048, is_packed=True)
        return collate([file[index] for index in range(num_sequences)], shape)


def make_heads(shape: str) -> tuple[PackedBatch, list[Tensor], Tensor]:
    num_heads, num_kv_heads, size, num_sequences, mean_tokens = SHAPES[shape]
    batch = make_batch(num_sequences, mean_tokens)
    num_tokens = batch.input_ids.shape[1]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count: int) -> Tensor:
        states = torch.randn(1, num_tokens, count, size, generator=generator, device="cuda")
        return states.to(torch.bfloat16)

    heads = [draw(count).transpose(1, 2).requires_grad_() for count in (num_heads, num_kv_heads, num_kv_heads)]
    return batch.to(torch.device("cuda")), heads, draw(num_heads)


def run(backend: Backend, documents: Any, heads: list[Tensor], grad: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = backend.kernel(heads[0], heads[1], heads[2], documents, None, None, None)
    return out, torch.autograd.grad(out, heads, grad.to(out.dtype))


def time_call(call: Callable[[], Any]) -> float:
    """Milliseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS


def record(call: Callable[[], Any]) -> Callable[[], Any]:
    """As a CUDA graph, as training does it: launching costs nothing."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    for is_last in (False, True):  # the first recording of a process may have to load a kernel, which none may
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
            break
        except RuntimeError:
            if is_last:
                raise
    return graph.replay


def measure_backend(case: Case) -> dict[str, Any]:
    batch, heads, grad = make_heads(case.shape)
    backend = BACKENDS[case.backend]
    documents = backend.describe(batch)
    out, grads = run(backend, documents, heads, grad)
    _, again = run(backend, documents, heads, grad)
    plain = Backend(kernel=in_groups(attend_eager), describe=describe_groups)
    wide = [head.detach().float().requires_grad_() for head in heads]
    wanted, wanted_grads = run(plain, plain.describe(batch), wide, grad.float())
    pairs = [(out, wanted), *zip(grads, wanted_grads, strict=True)]
    differences = [float((one.float() - other).norm() / other.norm()) for one, other in pairs]
    del wanted, wanted_grads, wide, pairs
    forward = record(lambda: backend.kernel(heads[0], heads[1], heads[2], documents, None, None, None))
    both = record(lambda: run(backend, documents, heads, grad))
    times = [(time_call(forward), time_call(both)) for _ in range(REPEATS)]
    of_forward = statistics.median(one for one, _ in times)
    return {
        "forward_ms": of_forward,
        "backward_ms": statistics.median(one for _, one in times) - of_forward,
        "differences": differences,
        "same_twice": all(torch.equal(one, other) for one, other in zip(grads, again, strict=True)),
    }


def measure_tile(case: Case) -> dict[str, Any]:
    from launcher.training.attention_tiles import Heads, Scores, Tile, attend, find_key_gradients, find_query_gradients
    from launcher.training.document_attention import TILES

    batch, tensors, grad = make_heads(case.shape)
    documents = BACKENDS["triton"].describe(batch)
    query, key, value = (one.detach().transpose(1, 2).flatten(0, 1) for one in tensors)
    size = query.shape[-1]
    heads = Heads(query, key, value, documents["starts"], documents["ends"], Scores(scale=size**-0.5))
    given, tile, tiles = grad.flatten(0, 1), Tile(*case.tile), TILES[size]
    out, log_sums = attend(heads, tiles.forward)
    _, alongs = find_query_gradients(heads, out, given, log_sums, tiles.queries)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: attend(heads, tile),
        "queries": lambda: find_query_gradients(heads, out, given, log_sums, tile),
        "keys": lambda: find_key_gradients(heads, given, log_sums, alongs, tile),
    }
    call = record(calls[case.kernel])
    return {"ms": statistics.median(time_call(call) for _ in range(REPEATS))}


def measure(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        sys.exit("it needs a GPU: none of these kernels runs elsewhere")
    groups = {"backends": BACKEND_CASES, "tiles": TILE_CASES}
    for case in iterate_left([case for name in args.cases for case in groups[name]], args.out, args.minutes):
        try:
            row = measure_tile(case) if case.kernel else measure_backend(case)
        except Exception as error:  # a tile that does not fit, a package that is not there
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
    run_verbs(__doc__, ["backends"], "backends, tiles", measure, table)
