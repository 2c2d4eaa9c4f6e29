"""Compile every Triton kernel for GPUs that this machine does not have. A separate program: it fakes Triton's driver.

The interpreter runs a kernel's code, but only the compiler shows whether a GPU can run it. Each kernel is called as in
training, with heads, ranks and dtypes of real base models; instead of a launch it is compiled and inspected.

    python tests/training/compile_cases.py 90 89      # compute capabilities
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from launcher.training.kernels import (
    cross_entropy_triton,
    decode_attention_triton,
    fp8,
    fp8_matmul_triton,
    fp8_triton,
    fused_lora_triton,
    nf4_triton,
    rmsnorm_dropout_triton,
    rope_swiglu_triton,
    stochastic_rounding_triton,
    varlen_attention,
)
from launcher.training.kernels.fp8 import LoraTerm
from launcher.training.kernels.nf4 import Nf4Weights
from launcher.training.kernels.seeded_dropout import DropoutSeed

# Shared memory per thread block, in bytes (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
# Stack per thread; registers spilled there are many times slower. With heads of 256, tiles that spill a little were the
# fastest on an H200 (2026-11-17): dK and dV of 64 x 64 take 0.29 ms, of 16 x 64 without spills 0.41 ms.
MAX_STACK_BYTES = 128
MAX_STACK_BYTES_256 = 512
NUM_TOKENS = 256
BF16 = torch.bfloat16


class _FakeDriver:
    """The part of a driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@dataclass
class CompiledKernels:
    kernels: dict[str, list[tuple[Any, int | None]]] = field(default_factory=dict)


@contextmanager
def compiling(capability: int) -> Iterator[CompiledKernels]:
    """Compile kernels that are launched inside the context, and collect them."""
    run, compiled = JITFunction.run, CompiledKernels()

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.kernels.setdefault(f"{self.__module__}.{self.__name__}", []).append((kernel, kwargs.get("head_dim")))
        return kernel

    driver.set_active(_FakeDriver(capability))
    JITFunction.run = compile_instead
    try:
        yield compiled
    finally:
        JITFunction.run = run


def check_all(capability: int) -> None:
    with compiling(capability) as compiled:
        compile_elementwise()
        compile_fused_lora()
        compile_cross_entropy()
        compile_decode_attention()
        if capability >= 89:
            compile_fp8(with_matmul=capability == 90)
        if capability // 10 == 9:
            compile_attention()
    for name, kernels in compiled.kernels.items():
        for kernel, head_dim in kernels:
            shared, stack = kernel.metadata.shared, count_stack_bytes(kernel.asm["cubin"])
            assert shared <= SHARED_MEMORY[capability], (name, capability, shared)
            assert stack <= (MAX_STACK_BYTES_256 if head_dim == 256 else MAX_STACK_BYTES), (name, capability, stack)
            if "varlen_attention" in name or "fp8_matmul_triton._matmul" in name:  # Hopper's instructions
                assert "wgmma.mma_async" in kernel.asm["ptx"], name
                assert "cp.async.bulk.tensor" in kernel.asm["ptx"], name
    print(f"{capability}: {sum(map(len, compiled.kernels.values()))} variants of {len(compiled.kernels)} kernels")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def compile_elementwise() -> None:
    for key in (3, (1 << 32) - 5):
        stochastic_rounding_triton.round_stochastically_triton(zeros(5000), key, 1 << 24)
    x, wide = zeros(NUM_TOKENS, 1024, dtype=BF16), zeros(NUM_TOKENS, 1072, dtype=BF16)
    rmsnorm_dropout_triton.rms_norm(x, zeros(1024, dtype=BF16), 1e-6, wide)
    rmsnorm_dropout_triton.rms_norm(
        zeros(NUM_TOKENS, 4096, dtype=BF16), zeros(4096, dtype=BF16), 1e-6, zeros(NUM_TOKENS, 4144, dtype=BF16)
    )
    rmsnorm_dropout_triton.copy_rows(x, wide)
    rmsnorm_dropout_triton.rms_norm_backward(x, x, zeros(1024, dtype=BF16), 1e-6, x)
    seed = DropoutSeed(torch.zeros(1, dtype=torch.int32), 0.1)
    for splits in (False, True):
        for normed_out in (None, x):
            rmsnorm_dropout_triton.rms_norm(x, zeros(1024, dtype=BF16), 1e-6, wide, seed, x, normed_out, splits)
        rmsnorm_dropout_triton.dropout(wide[:, :1024], x, seed, x if splits else None)
        rmsnorm_dropout_triton.dropout_backward(x, x, seed, splits=splits)
    states = zeros(NUM_TOKENS, 6144, dtype=BF16)
    for rest in (None, x):
        rmsnorm_dropout_triton.scale_columns(x, zeros(1024), rest, x)
    rmsnorm_dropout_triton.scale_columns_backward(x, x, zeros(1024), x)
    half = zeros(NUM_TOKENS, 3072, dtype=BF16)
    for scales, rest in ((None, None), (zeros(6144), None), (zeros(6144), half), (zeros(6144), states)):
        out, grad = zeros(NUM_TOKENS, 6176, dtype=BF16), zeros(NUM_TOKENS, 3072, dtype=BF16)
        rests = None if rest is None else (rest, rest)
        for is_gelu in (False, True):
            rope_swiglu_triton.swiglu(states, scales, zeros(NUM_TOKENS, 3088, dtype=BF16), rest, is_gelu=is_gelu)
            rope_swiglu_triton.swiglu_backward(grad, states, scales, out, rests, is_gelu=is_gelu)
    for num_heads, num_kv_heads, size in ((16, 8, 128), (32, 8, 64), (8, 4, 256)):
        for scaled, added in ((False, False), (True, False), (True, True)):
            for normed in (False, True):
                compile_qk_norm_rope(num_heads, num_kv_heads, size, scaled=scaled, normed=normed, added=added)


def compile_qk_norm_rope(
    num_heads: int, num_kv_heads: int, size: int, *, scaled: bool, normed: bool, added: bool
) -> None:
    count = num_heads + 2 * num_kv_heads
    states = zeros(NUM_TOKENS, count * size, dtype=BF16)
    scales = zeros(count * size) if scaled else None
    norms = (zeros(size, dtype=BF16), zeros(size, dtype=BF16)) if normed else None
    cos, sin = zeros(NUM_TOKENS, size, dtype=BF16), zeros(NUM_TOKENS, size, dtype=BF16)
    query, key, value = (
        zeros(NUM_TOKENS, heads, size, dtype=BF16) for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    rest = states if added else None
    rope_swiglu_triton.qk_norm_rope(states, scales, norms, cos, sin, 1e-6, (query, key, value), rest)
    wide = zeros(NUM_TOKENS, count * size + 48, dtype=BF16)
    rests = None if rest is None else (rest, rest)
    rope_swiglu_triton.qk_norm_rope_backward((query, key, value), states, scales, norms, cos, sin, 1e-6, wide, rests)


def compile_fused_lora() -> None:
    for rank in (8, 16, 64):
        matrices = [zeros(rank, 1024), zeros(2048, rank)]
        targets = [zeros(rank, 1024, dtype=BF16), zeros(2048, rank, dtype=BF16)]
        fused_lora_triton.LoraCopy(list(zip(matrices, targets, (1.0, 2.0), (None, zeros(2048)), strict=True)))()
        a_grads, b_grads = zeros(3 * rank, 1024, dtype=BF16), zeros(4096, 3 * rank, dtype=BF16)
        lora_a_grad, lora_b_grad = zeros(3 * rank, 1024), zeros(4096, rank)
        for a_parts, b_parts in ((a_grads, b_grads), (zeros(3, 3 * rank, 1024), zeros(2, 4096, 3 * rank))):
            fused_lora_triton.split_lora_grads(a_parts, b_parts, [2048, 1024, 1024], 2.0, lora_a_grad, lora_b_grad)
        num_codes, num_scales = 4096 * 1024 // 2, 4096 * 1024 // 64
        stored = Nf4Weights(
            *(zeros(num_codes, dtype=torch.uint8), zeros(16), zeros(num_scales, dtype=torch.uint8), zeros(256)),
            *(zeros(num_scales // 256), zeros(num_scales // 256)),
            *(zeros(4096, 3 * rank, dtype=BF16), zeros(3 * rank, 1024 + 3 * rank, dtype=BF16)),
        )
        nf4_triton.dequantize_into(zeros(4096 + 3 * rank, 1024 + 3 * rank, dtype=BF16), stored)
    # In fp32, because torch.mm accepts out_dtype on a GPU only.
    fused_lora_triton.compute_row_norms(zeros(4096, 1024), zeros(48, 1024), zeros(4096, 48), zeros(4096), zeros(4096))


def compile_fp8(*, with_matmul: bool) -> None:
    """The sizes of 0.6B and 8B; the matmul kernel is for compute capability 9.0, torch's is used elsewhere."""
    for hidden, intermediate, ranks in ((1024, 3072, 32), (4096, 12288, 128)):
        x, gate_up = zeros(NUM_TOKENS, hidden, dtype=BF16), zeros(NUM_TOKENS, 2 * intermediate, dtype=BF16)
        rows = fp8_triton.quantize_rows(x, zeros(hidden, dtype=BF16), 1e-6)
        for is_gelu in (False, True):
            for scales in (None, zeros(2 * intermediate)):
                fp8_triton.swiglu(gate_up, scales, is_gelu=is_gelu)
            grad = zeros(NUM_TOKENS, intermediate, dtype=BF16)
            grads = fp8_triton.swiglu_backward(grad, gate_up, zeros(2 * intermediate), is_gelu=is_gelu)
            kept = torch.empty_like(gate_up)
            fp8_triton.swiglu_backward(grad, gate_up, zeros(2 * intermediate), is_gelu=is_gelu, unrounded=kept)
        fp8_triton.quantize_rows(gate_up, zeros(2 * intermediate))
        compile_fp8_rope_backward(16 if hidden == 1024 else 32, 8)
        lora_a, scaled_b = zeros(ranks, hidden, dtype=BF16), zeros(2 * intermediate, ranks, dtype=BF16)
        x_lora = fp8_matmul_triton.project_rows(*rows, lora_a.t())
        grad_lora = fp8_matmul_triton.project_rows(*grads, scaled_b)
        fp8_matmul_triton.sum_products(*rows, grad_lora, None, transposed=False)
        fp8_matmul_triton.sum_products(*grads, x_lora, zeros(2 * intermediate), transposed=True)
        codes = zeros(2 * intermediate, hidden, dtype=torch.uint8).view(fp8.DTYPE)
        transposed = fp8_matmul_triton.transpose(codes)
        if with_matmul:
            forward, backward = LoraTerm(x_lora, scaled_b, True), LoraTerm(grad_lora, lora_a, False)
            fp8_matmul_triton.matmul(*rows, codes, zeros(2 * intermediate), BF16, forward)
            fp8_matmul_triton.matmul(*grads, transposed, None, BF16, backward)
            fp8_matmul_triton.matmul(*rows, codes, zeros(2 * intermediate), BF16, None)


def compile_fp8_rope_backward(num_heads: int, num_kv_heads: int) -> None:
    width = (num_heads + 2 * num_kv_heads) * 128
    query, key = (zeros(NUM_TOKENS, heads, 128, dtype=BF16) for heads in (num_heads, num_kv_heads))
    qkv, cos = zeros(NUM_TOKENS, width, dtype=BF16), zeros(NUM_TOKENS, 128, dtype=BF16)
    for norms in (None, (zeros(128, dtype=BF16), zeros(128, dtype=BF16))):
        for unrounded in (None, fp8.UnroundedGrads.allocate(qkv, width, 128, has_norms=norms is not None)):
            fp8_triton.qk_norm_rope_backward((query, key, key), qkv, norms, cos, cos, 1e-6, zeros(width), unrounded)


def compile_cross_entropy() -> None:
    for softcap in (None, 30.0):
        cross_entropy_triton.cross_entropy_in_place(
            zeros(8, 151936, dtype=BF16), torch.zeros(8, dtype=torch.int64), softcap
        )


def compile_decode_attention() -> None:
    for num_heads, num_kv_heads, size in ((9, 3, 64), (12, 2, 128), (4, 1, 256)):
        query, key = zeros(4, num_heads, 1, size, dtype=BF16), zeros(4, num_kv_heads, NUM_TOKENS, size, dtype=BF16)
        decode_attention_triton.decode_attention(query, key, key, torch.ones(4, NUM_TOKENS, dtype=torch.bool))


def compile_attention() -> None:
    """Registers that spill would make them many times slower without any error."""
    starts, ends = torch.zeros(NUM_TOKENS, dtype=torch.int32), torch.zeros(NUM_TOKENS, dtype=torch.int32)
    shapes = [(128, 16, 8), (128, 14, 2), (64, 14, 2), (128, 8, 8)]
    for (size, num_heads, num_kv_heads), (softcap, window) in [
        *((shape, (None, None)) for shape in shapes),
        ((128, 32, 16), (50.0, 4096)),
        ((256, 8, 4), (50.0, 4096)),
        ((256, 4, 1), (None, 512)),
    ]:
        query, key = (zeros(NUM_TOKENS, count, size, dtype=BF16) for count in (num_heads, num_kv_heads))
        options = varlen_attention.ScoreOptions(sm_scale=size**-0.5, softcap=softcap, window=window)
        inputs = varlen_attention.AttentionInputs(query, key, key.clone(), starts, ends, options)
        tiles = varlen_attention.choose_tiles(inputs)
        o, lse = varlen_attention.compute_output(inputs, tiles.forward)
        _, delta = varlen_attention.compute_dq(inputs, o, query, lse, tiles.dq)
        varlen_attention.compute_dkdv(inputs, query, lse, delta, tiles.dkdv)


def count_stack_bytes(binary: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"STACK:(\d+)", usage)
    assert match is not None, usage
    return int(match[1])


if __name__ == "__main__":
    for capability in sys.argv[1:]:
        check_all(int(capability))
