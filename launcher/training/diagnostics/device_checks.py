"""Checks of torch and the device, by running small computations of a second or two."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from launcher.core.choices import AttentionBackend
from launcher.core.units import GIB, MIB, format_gib
from launcher.training.diagnostics.check import CheckFunction, NotNeededError, NotTriedError, Passed, format_version

_MATRIX_SIZE = 8192  # large enough to reach the GPU's peak; 400 MiB in BF16
_SMALL_MATRIX_SIZE = 256
_WARMUP_SECONDS = 0.3  # clocks rise only under load
_ROUNDS = 10
_COPY_BYTES = 256 * MIB
_MIN_FREE_BYTES = 3 * GIB
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _LENGTHS = 4, 2, 64, (37, 128, 5, 86)
# Relative difference between two implementations of attention; in BF16 they round differently.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise NotNeededError("no GPU")
    free, _ = torch.cuda.mem_get_info()
    if free < _MIN_FREE_BYTES:
        raise NotTriedError(f"only {format_gib(free)} of GPU memory is free")


def check_torch() -> Passed:
    """Report the versions of torch, CUDA and NCCL, and the GPUs."""
    version = f"torch {torch.__version__}"
    built = torch.version.cuda
    if not torch.cuda.is_available():
        return Passed(f"{version}, built for {'CUDA ' + built if built else 'the CPU'}", gpus=0.0)
    torch.zeros(1, device="cuda")  # raises if the driver is too old
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Passed(f"{version}, CUDA {built}, NCCL {nccl}, sees {count} x {name}", gpus=float(count))


def check_bf16() -> Passed:
    """Check a BF16 matmul and measure its speed."""
    device = _device()
    size = _MATRIX_SIZE if device.type == "cuda" else _SMALL_MATRIX_SIZE
    if device.type == "cuda":
        _require_gpu()
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    _check_matmul(left @ right, left, right, 0.02)
    if device.type == "cpu":
        return Passed("BF16 matmuls are correct; training on a CPU uses FP32 anyway")
    tflops = _time_matmul(left, right)
    return Passed(f"BF16 matmuls are correct, {tflops:.0f} TFLOPS", tflops=tflops)


def _check_matmul(product: torch.Tensor, left: torch.Tensor, right: torch.Tensor, allowed: float) -> float:
    """Return a matmul's relative error, from a few rows computed in FP64; raise ArithmeticError if it is too large."""
    exact = left[:8].double() @ right.double()
    error = float((product[:8].double() - exact).norm() / exact.norm())
    if not error <= allowed:
        raise ArithmeticError(f"matmul has a relative error of {error:.1e}; rounding can cause at most {allowed:.0e}")
    return error


def _time_matmul(left: torch.Tensor, right: torch.Tensor) -> float:
    until = time.monotonic() + _WARMUP_SECONDS
    while time.monotonic() < until:
        left @ right
        torch.cuda.synchronize()
    seconds = _time(lambda: left @ right, _ROUNDS)
    return 2 * left.shape[0] ** 3 / seconds / 1e12


def _time(action: Callable[[], Any], rounds: int) -> float:
    """Return the mean seconds per call, measured with CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / rounds


def check_tf32() -> Passed:
    """Check that enabling TF32 has an effect: matmuls must have the rounding error of a 10-bit mantissa."""
    _require_gpu()
    if torch.cuda.get_device_capability() < (8, 0):
        raise NotNeededError("this GPU has no TF32 (needs compute capability 8.0)")
    left, right = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    previous = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        error = _check_matmul(left @ right, left, right, 5e-3)
        tflops = _time_matmul(left, right)
        torch.backends.cuda.matmul.allow_tf32 = False
        fp32_error = _check_matmul(left @ right, left, right, 1e-5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous
    if error < 10 * fp32_error:
        raise RuntimeError(
            f"TF32 is enabled, but matmuls have FP32's error ({error:.0e}): is NVIDIA_TF32_OVERRIDE set?"
        )
    return Passed(
        f"active when enabled (error {error:.0e}, {fp32_error:.0e} without), {tflops:.0f} TFLOPS", tflops=tflops
    )


def check_attention(backend: AttentionBackend) -> Passed:
    """Check that attention over packed documents gives the outputs and gradients of each document alone."""
    from launcher.training.data.collate import collate_lengths
    from launcher.training.model.attention import BACKENDS

    device = _device()
    if device.type == "cpu" and backend not in ("sdpa", "eager"):
        raise NotNeededError("no GPU")
    if backend == "varlen" or backend.startswith("flash_attention"):
        _require_gpu()
        if torch.cuda.get_device_capability() < (8, 0):
            raise NotNeededError("this GPU has no FlashAttention (needs compute capability 8.0)")
    if backend == "triton":
        _require_gpu()
        if torch.cuda.get_device_capability()[0] != 9:
            raise NotNeededError("these kernels need a Hopper GPU")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    total = sum(_LENGTHS)
    shapes = [(1, heads, total, _HEAD_DIM) for heads in (_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS)]
    tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    batch = collate_lengths(_LENGTHS).to(device)
    query, key, value = tensors
    out = BACKENDS[backend].kernel(query, key, value, BACKENDS[backend].build_metadata(batch), None, None, None)
    gradients = torch.autograd.grad(out.float().square().sum(), tensors)
    expected, expected_gradients = _attend_separately(tensors)
    pairs = [(out, expected), *zip(gradients, expected_gradients, strict=True)]
    error = max(_relative_difference(left.detach().float(), right.detach().float()) for left, right in pairs)
    if not error <= _TOLERANCE[dtype]:
        raise ArithmeticError(f"packed documents differ from separate ones by {error:.1e} (relative)")
    return Passed(f"packed documents equal separate ones, forward and backward (difference {error:.0e})")


def _relative_difference(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    return float((tensor - expected).norm() / expected.norm())


def _attend_separately(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    documents = zip(*(tensor.split(_LENGTHS, dim=2) for tensor in tensors), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    outputs = [attend(query, key, value, is_causal=True, enable_gqa=True) for query, key, value in documents]
    out = torch.cat(outputs, dim=2).transpose(1, 2)
    return out, torch.autograd.grad(out.float().square().sum(), tensors)


def _sin_cos(numbers: torch.Tensor) -> torch.Tensor:
    return torch.sin(numbers) * torch.cos(numbers) + 1


def check_compile() -> Passed:
    """Compile and run a small function; needs a C compiler and Triton."""
    if not torch.cuda.is_available():
        raise NotNeededError("no GPU: plans for CPUs do not use torch.compile")
    _require_gpu()
    numbers = torch.randn(1024, device="cuda")
    compiled = torch.compile(_sin_cos, fullgraph=True)
    if not torch.allclose(compiled(numbers), _sin_cos(numbers), atol=1e-5):
        raise ArithmeticError("a compiled function gives a wrong result")
    return Passed(f"compiled a small function, triton {format_version('triton')}")


def check_copies() -> Passed:
    """Measure copies between pinned host memory and the GPU."""
    _require_gpu()
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    device.copy_(host, non_blocking=True)
    to_gpu = _COPY_BYTES / _time(lambda: device.copy_(host, non_blocking=True), 5) / 1e9
    to_host = _COPY_BYTES / _time(lambda: host.copy_(device, non_blocking=True), 5) / 1e9
    return Passed(
        f"pinned memory, {to_gpu:.1f} GB/s to the GPU, {to_host:.1f} GB/s back", to_gpu=to_gpu, to_host=to_host
    )


def check_peers() -> Passed:
    """Check peer access between all pairs of GPUs, and measure one copy."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        raise NotNeededError("fewer than two GPUs")
    pairs = [(source, target) for source in range(count) for target in range(count) if source != target]
    denied = [f"{pair[0]}-{pair[1]}" for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    first = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    second = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda:1")
    second.copy_(first)
    speed = _COPY_BYTES / _time(lambda: second.copy_(first, non_blocking=True), 5) / 1e9
    access = f"all {len(pairs)} pairs" if not denied else f"not between {', '.join(denied[:6])}"
    return Passed(f"peer access: {access}; GPU 0 to 1 at {speed:.1f} GB/s", denied=float(len(denied)), speed=speed)


def check_spill() -> Passed:
    """Check, under WSL2, whether allocating more than the free GPU memory fails or spills into host memory."""
    if "microsoft" not in Path("/proc/version").read_text(errors="replace").lower() and not os.environ.get(
        "WSL_INTEROP"
    ):
        raise NotNeededError("not WSL2: a full GPU raises an error")
    if not torch.cuda.is_available():
        raise NotNeededError("no GPU")
    free, _ = torch.cuda.mem_get_info()
    try:
        torch.empty(free + GIB // 2, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        return Passed("a full GPU raises an error: no spilling into host memory", spills=0.0)
    return Passed("allocated more memory than is free: the driver spills into host memory", spills=1.0)


CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("BF16", check_bf16),
    ("TF32", check_tf32),
    ("attention: sdpa", partial(check_attention, "sdpa")),
    ("attention: varlen", partial(check_attention, "varlen")),
    ("attention: triton", partial(check_attention, "triton")),
    ("copies", check_copies),
    ("peer access", check_peers),
    ("spill", check_spill),
    ("torch.compile", check_compile),
)
