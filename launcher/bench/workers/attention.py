"""`python -m launcher.bench.workers.attention SPEC`: checks and times one attention backend on packed documents."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.bench.attention import AttentionSpec, AttentionTiming
from launcher.bench.workers.documents import write_random_store
from launcher.bench.workers.output import Send, run_worker
from launcher.core.choices import UNRECORDABLE_ATTENTION
from launcher.training.data.collate import PackedBatch, choose_batch_shape, collate
from launcher.training.model.attention import BACKENDS, Backend
from launcher.training.model.base_model import DTYPES
from launcher.training.model.padded_attention import attend_eager, build_group_metadata, make_grouped_kernel

REPEATS, CALLS = 7, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInputs:
    """Packed documents, q, k and v of [1, heads, tokens, head_dim], and the gradient of the output."""

    batch: PackedBatch
    heads: list[Tensor]
    grad: Tensor


def make_batch(num_sequences: int, sequence_length: int, mean_tokens: int) -> PackedBatch:
    """Return sequences packed with random documents of log-normal lengths."""
    with tempfile.TemporaryDirectory() as folder:
        store = write_random_store(
            Path(folder),
            num_packs=num_sequences,
            sequence_length=sequence_length,
            vocab_size=1000,
            mean_tokens=mean_tokens,
        )
        file = store.open_split("train")
        shape = choose_batch_shape(file.count("document_lengths"), num_sequences, sequence_length, is_packed=True)
        return collate([file[index] for index in range(num_sequences)], shape)


def make_inputs(spec: AttentionSpec, device: torch.device, num_sequences: int | None = None) -> AttentionInputs:
    """Return random attention inputs from a fixed seed, so that every backend gets the same ones."""
    shape = spec.shape
    batch = make_batch(num_sequences or spec.num_sequences, spec.sequence_length, spec.mean_tokens)
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> Tensor:
        size = 1, batch.input_ids.shape[1], count, shape.head_dim
        return torch.randn(size, generator=generator, device=device).to(DTYPES[shape.dtype])

    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    heads = [draw(count).transpose(1, 2).requires_grad_() for count in counts]
    return AttentionInputs(batch=batch.to(device), heads=heads, grad=draw(shape.num_heads))


def run_backend(
    backend: Backend, metadata: Any, heads: list[Tensor], grad: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run an attention backend forward and backward; return its output and the gradients of q, k and v."""
    out = backend.kernel(heads[0], heads[1], heads[2], metadata, None, None, None)
    return out.detach(), torch.autograd.grad(out, heads, grad.to(out.dtype))


def check_backend(backend: Backend, inputs: AttentionInputs) -> tuple[float, bool]:
    """Return the largest relative difference to FP32 attention, and whether two runs give the same gradients."""
    batch, heads, grad = inputs.batch, inputs.heads, inputs.grad
    metadata = backend.build_metadata(batch)
    out, grads = run_backend(backend, metadata, heads, grad)
    _, again = run_backend(backend, metadata, heads, grad)
    plain = Backend(kernel=make_grouped_kernel(attend_eager), build_metadata=build_group_metadata)
    wide = [head.detach().float().requires_grad_() for head in heads]
    expected, expected_grads = run_backend(plain, plain.build_metadata(batch), wide, grad.float())
    pairs = [(out, expected), *zip(grads, expected_grads, strict=True)]
    differences = [float((one.float() - other).norm() / other.norm()) for one, other in pairs]
    return max(differences), all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))


def time_call(call: Callable[[], Any], device: torch.device, num_calls: int = CALLS) -> float:
    """Return the mean milliseconds per call of a function, measured with CUDA events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        return 1e3 * (time.perf_counter() - start) / num_calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / num_calls


def capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call as a CUDA graph, as training does, and return its replay, without kernel launch overhead."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    for is_last in (False, True):  # the first capture may fail because it has to load a kernel
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
            break
        except RuntimeError:
            if is_last:
                raise
    return graph.replay


def measure_backend(
    spec: AttentionSpec, device: torch.device, *, repeats: int = REPEATS, num_calls: int = CALLS
) -> AttentionTiming:
    """Check an attention backend on one sequence; return its median times on all, as CUDA graphs if supported."""
    backend = BACKENDS[spec.backend]
    difference, is_deterministic = check_backend(backend, make_inputs(spec, device, num_sequences=1))
    inputs = make_inputs(spec, device)
    heads, metadata = inputs.heads, backend.build_metadata(inputs.batch)

    def run_forward() -> Tensor:
        return backend.kernel(heads[0], heads[1], heads[2], metadata, None, None, None)

    def run_both() -> Any:
        return run_backend(backend, metadata, heads, inputs.grad)

    calls: list[Callable[[], Any]] = [run_forward, run_both]
    if device.type == "cuda" and spec.backend not in UNRECORDABLE_ATTENTION:
        calls = [capture(call) for call in calls]
    for call in calls:  # compiles FlexAttention
        call()
    times = [[time_call(call, device, num_calls) for call in calls] for _ in range(repeats)]
    forward_ms, both_ms = (statistics.median(column) for column in zip(*times, strict=True))
    return AttentionTiming(
        forward_ms=forward_ms,
        backward_ms=both_ms - forward_ms,
        difference=difference,
        is_deterministic=is_deterministic,
    )


def measure(spec: AttentionSpec, send: Send) -> None:
    """Measure one attention backend on the GPU and send the timing."""
    send(measure_backend(spec, torch.device("cuda")))


if __name__ == "__main__":
    sys.exit(run_worker(AttentionSpec, measure))
