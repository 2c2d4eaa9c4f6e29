"""What torch and the device can do: seen by doing it, in a second or two each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launcher.choices import AttentionBackend
from launcher.training.trying import CheckFunction, Found, NotNeededError, NotTriedError, format_version
from launcher.units import GIB, MIB, format_gib

_PRODUCT = 8192  # square: large enough to show what the card reaches, 400 MiB in BF16
_SMALL_PRODUCT = 256
_WARM_SECONDS = 0.3  # clocks go up only once there is work
_ROUNDS = 10
_COPY_BYTES = 256 * MIB
_ROOM = 3 * GIB
_HEADS, _KEY_HEADS, _FEATURES, _LENGTHS = 4, 2, 64, (37, 128, 5, 86)
# Between two ways to compute the same attention, relative: in BF16 they round differently.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise NotNeededError("no GPU")
    free, _ = torch.cuda.mem_get_info()
    if free < _ROOM:
        raise NotTriedError(f"only {format_gib(free)} of GPU memory are free")


def check_torch() -> Found:
    version = f"torch {torch.__version__}"
    built = torch.version.cuda
    if not torch.cuda.is_available():
        return Found(f"{version}, built for {'CUDA ' + built if built else 'the CPU'}", gpus=0.0)
    torch.zeros(1, device="cuda")  # a driver that is too old says so here
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    return Found(f"{version}, CUDA {built}{_find_nccl()}, sees {count} x {name}", gpus=float(count))


def _find_nccl() -> str:
    from torch.cuda import nccl

    try:
        return f", NCCL {'.'.join(map(str, nccl.version()))}"
    except AttributeError:  # a build without
        return ""


def check_bf16() -> Found:
    """Right, and how fast."""
    device = _device()
    size = _PRODUCT if device.type == "cuda" else _SMALL_PRODUCT
    if device.type == "cuda":
        _need_gpu()
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    _check_product(left @ right, left, right, 0.02)
    if device.type == "cpu":
        return Found("products in BF16 are right; a CPU trains in FP32 all the same")
    tflops = _time_product(left, right)
    return Found(f"products in BF16 are right, {tflops:.0f} TFLOPS", tflops=tflops)


def _check_product(product: torch.Tensor, left: torch.Tensor, right: torch.Tensor, allowed: float) -> float:
    """A few rows of it against FP64: the whole would take longer than what is tested."""
    exact = left[:8].double() @ right.double()
    error = float((product[:8].double() - exact).norm() / exact.norm())
    if not error <= allowed:
        raise ArithmeticError(f"a product is off by {error:.1e} (relative), rounding explains {allowed:.0e}")
    return error


def _time_product(left: torch.Tensor, right: torch.Tensor) -> float:
    until = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < until:
        left @ right
        torch.cuda.synchronize()
    seconds = _time(lambda: left @ right, _ROUNDS)
    return 2 * left.shape[0] ** 3 / seconds / 1e12


def _time(action: Callable[[], Any], rounds: int) -> float:
    """Seconds of one, on the GPU's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / rounds


def check_tf32() -> Found:
    """Seen by its rounding: ten bits of mantissa leave another error than FP32's 23."""
    _need_gpu()
    if torch.cuda.get_device_capability() < (8, 0):
        raise NotNeededError("this GPU has none (needs compute capability 8.0)")
    left, right = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    was = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        error = _check_product(left @ right, left, right, 5e-3)
        tflops = _time_product(left, right)
        torch.backends.cuda.matmul.allow_tf32 = False
        plain = _check_product(left @ right, left, right, 1e-5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was
    if error < 10 * plain:
        raise RuntimeError(f"it is switched on, but products have FP32's error ({error:.0e}): NVIDIA_TF32_OVERRIDE?")
    return Found(f"active when asked for (error {error:.0e}, without {plain:.0e}), {tflops:.0f} TFLOPS", tflops=tflops)


def check_attention(backend: AttentionBackend) -> Found:
    """Forward and backward over packed documents, by the training's own kernel, against each document alone."""
    from launcher.training.attention import BACKENDS

    device = _device()
    if device.type == "cpu" and backend not in ("sdpa", "eager"):
        raise NotNeededError("no GPU")
    if backend == "varlen" or backend.startswith("flash_attention"):
        _need_gpu()
        if torch.cuda.get_device_capability() < (8, 0):
            raise NotNeededError("this GPU has no FlashAttention (needs compute capability 8.0)")
    if backend == "triton":
        _need_gpu()
        if torch.cuda.get_device_capability()[0] != 9:
            raise NotNeededError("our own kernels are for Hopper")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    total = sum(_LENGTHS)
    shapes = [(1, heads, total, _FEATURES) for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS)]
    tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    batch = _make_batch(device)
    query, key, value = tensors
    out = BACKENDS[backend].kernel(query, key, value, BACKENDS[backend].describe(batch), None, None, None)
    gradients = torch.autograd.grad(out.float().square().sum(), tensors)
    wanted, wanted_gradients = _attend_alone(tensors)
    pairs = [(out, wanted), *zip(gradients, wanted_gradients, strict=True)]
    error = max(_difference(one.detach().float(), other.detach().float()) for one, other in pairs)
    if not error <= _TOLERANCE[dtype]:
        raise ArithmeticError(f"packed documents differ from each alone by {error:.1e} (relative)")
    return Found(f"{len(_LENGTHS)} packed documents = each alone, forward and backward (differs by {error:.0e})")


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _make_batch(device: torch.device) -> Any:
    """As the loader makes one, of documents whose tokens do not matter here."""
    import numpy as np

    from launcher.corpus.packs import Pack
    from launcher.training.batches import Shape, collate

    total = sum(_LENGTHS)
    pack = Pack(
        np.ones(total, dtype=np.int32),
        np.ones(total, dtype=np.bool_),
        np.array(_LENGTHS, dtype=np.int32),
        np.arange(len(_LENGTHS)),
    )
    shape = Shape(micro_batch_size=1, sequence_length=total, document_sizes=(len(_LENGTHS),), is_packed=True)
    return collate([pack], shape).to(device)


def _attend_alone(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    pieces = zip(*(tensor.split(_LENGTHS, dim=2) for tensor in tensors), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    alone = [attend(query, key, value, is_causal=True, enable_gqa=True) for query, key, value in pieces]
    out = torch.cat(alone, dim=2).transpose(1, 2)
    return out, torch.autograd.grad(out.float().square().sum(), tensors)


def _waves(numbers: torch.Tensor) -> torch.Tensor:
    return torch.sin(numbers) * torch.cos(numbers) + 1


def check_compile() -> Found:
    """A small function, fused and run: needs a compiler for C, and triton."""
    if not torch.cuda.is_available():
        raise NotNeededError("no GPU: plans for a CPU do not compile")
    _need_gpu()
    numbers = torch.randn(1024, device="cuda")
    compiled = torch.compile(_waves, fullgraph=True)
    if not torch.allclose(compiled(numbers), _waves(numbers), atol=1e-5):
        raise ArithmeticError("a compiled function computes something else than the plain one")
    return Found(f"a small function was fused, triton {format_version('triton')}")


def check_copies() -> Found:
    """From pinned host memory to the GPU and back."""
    _need_gpu()
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    device.copy_(host, non_blocking=True)
    there = _COPY_BYTES / _time(lambda: device.copy_(host, non_blocking=True), 5) / 1e9
    back = _COPY_BYTES / _time(lambda: host.copy_(device, non_blocking=True), 5) / 1e9
    return Found(f"pinned memory, {there:.1f} GB/s to the GPU, {back:.1f} GB/s back", to_gpu=there, to_host=back)


def check_peers() -> Found:
    """Every pair: may it, and how fast."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        raise NotNeededError("fewer than two GPUs")
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    denied = [f"{one}-{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda:1")
    target.copy_(source)
    speed = _COPY_BYTES / _time(lambda: target.copy_(source, non_blocking=True), 5) / 1e9
    words = f"all {len(pairs)} pairs" if not denied else f"not between {', '.join(denied[:6])}"
    return Found(f"direct access: {words}; GPU 0 to 1 at {speed:.1f} GB/s", denied=float(len(denied)), speed=speed)


def check_spill() -> Found:
    """Asks for more than there is. Elsewhere than under WSL2 the driver has never given it."""
    if "microsoft" not in Path("/proc/version").read_text(errors="replace").lower() and not os.environ.get(
        "WSL_INTEROP"
    ):
        raise NotNeededError("not WSL2: a full GPU says so")
    if not torch.cuda.is_available():
        raise NotNeededError("no GPU")
    free, _ = torch.cuda.mem_get_info()
    try:
        torch.empty(free + GIB // 2, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        return Found("a full GPU says so: it does not spill into the host's memory", spills=0.0)
    return Found("more memory was given than is free: the driver spills into the host's memory", spills=1.0)


def _attention(backend: AttentionBackend) -> CheckFunction:
    return lambda: check_attention(backend)


CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("BF16", check_bf16),
    ("TF32", check_tf32),
    ("attention: sdpa", _attention("sdpa")),
    ("attention: varlen", _attention("varlen")),
    ("attention: triton", _attention("triton")),
    ("copies", check_copies),
    ("peer access", check_peers),
    ("spill", check_spill),
    ("torch.compile", check_compile),
)
