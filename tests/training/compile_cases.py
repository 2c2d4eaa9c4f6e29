"""Every Triton kernel, compiled for GPUs that are not there. A program of its own: it makes Triton believe in one.

The interpreter runs a kernel's code; only the compiler says whether a GPU could. Each kernel is called as training
calls it, with heads, ranks and dtypes of real bases; what would be launched is compiled instead, and looked at.

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

from launcher.training import attention_tiles, block_kernels, layer_kernels, loss_kernel, packed_kernels, row_kernels
from launcher.training.document_attention import choose_tiles
from launcher.training.dropping import Dropping

# Bytes that a block of threads may have in shared memory (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
FEW_BYTES = 128  # of a thread's stack: what is spilt there is many times slower than the kilobyte of registers
NUM_TOKENS = 256
BF16 = torch.bfloat16


class _Gpu:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@dataclass
class Made:
    kernels: dict[str, list[Any]] = field(default_factory=dict)


@contextmanager
def compiling(capability: int) -> Iterator[Made]:
    """What is launched inside is compiled, and kept."""
    run, made = JITFunction.run, Made()

    def compile_instead(self: Any, *arguments: Any, grid: Any, warmup: bool, **more: Any) -> Any:  # noqa: ARG001
        kernel = run(self, *arguments, grid=grid, warmup=True, **more)
        made.kernels.setdefault(f"{self.__module__}.{self.__name__}", []).append(kernel)
        return kernel

    driver.set_active(_Gpu(capability))
    JITFunction.run = compile_instead
    try:
        yield made
    finally:
        JITFunction.run = run


def check_all(capability: int) -> None:
    with compiling(capability) as made:
        call_layers()
        call_blocks()
        call_loss()
        if capability // 10 == 9:
            call_attention()
    for name, kernels in made.kernels.items():
        for kernel in kernels:
            shared, stack = kernel.metadata.shared, count_stack_bytes(kernel.asm["cubin"])
            assert shared <= SHARED_MEMORY[capability], (name, capability, shared)
            assert stack <= FEW_BYTES, (name, capability, stack)
            if "attention" in name:  # by Hopper's own product and copy engine
                assert "wgmma.mma_async" in kernel.asm["ptx"], name
                assert "cp.async.bulk.tensor" in kernel.asm["ptx"], name
    print(f"{capability}: {sum(map(len, made.kernels.values()))} variants of {len(made.kernels)} kernels")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def call_layers() -> None:
    x, wide = draw(NUM_TOKENS, 1024, dtype=BF16), draw(NUM_TOKENS, 1072, dtype=BF16)
    row_kernels.norm(x, draw(1024, dtype=BF16), 1e-6, wide)
    row_kernels.norm(
        draw(NUM_TOKENS, 4096, dtype=BF16), draw(4096, dtype=BF16), 1e-6, draw(NUM_TOKENS, 4144, dtype=BF16)
    )
    row_kernels.copy(x, wide)
    row_kernels.norm_back(x, x, draw(1024, dtype=BF16), 1e-6, x)
    dropping = Dropping(torch.zeros(1, dtype=torch.int32), 0.1)
    for splits in (False, True):
        for whole in (None, x):
            row_kernels.norm(x, draw(1024, dtype=BF16), 1e-6, wide, dropping, x, whole, splits)
        row_kernels.drop(wide[:, :1024], x, dropping, x if splits else None)
        row_kernels.mix(x, x, dropping, splits=splits)
    states = draw(NUM_TOKENS, 6144, dtype=BF16)
    for rest in (None, x):
        row_kernels.scale(x, draw(1024), rest, x)
    row_kernels.scale_back(x, x, draw(1024), x)
    half = draw(NUM_TOKENS, 3072, dtype=BF16)
    for scales, rest in ((None, None), (draw(6144), None), (draw(6144), half), (draw(6144), states)):
        layer_kernels.gate(states, scales, draw(NUM_TOKENS, 3088, dtype=BF16), rest)
        out, grad = draw(NUM_TOKENS, 6176, dtype=BF16), draw(NUM_TOKENS, 3072, dtype=BF16)
        layer_kernels.gate_back(grad, states, scales, out, None if rest is None else (rest, rest))
    for num_heads, num_kv_heads, size in ((16, 8, 128), (32, 8, 64)):
        for scaled, added in ((False, False), (True, False), (True, True)):
            for normed in (False, True):
                call_heads(num_heads, num_kv_heads, size, scaled=scaled, normed=normed, added=added)


def call_heads(num_heads: int, num_kv_heads: int, size: int, *, scaled: bool, normed: bool, added: bool) -> None:
    count = num_heads + 2 * num_kv_heads
    states = draw(NUM_TOKENS, count * size, dtype=BF16)
    scales = draw(count * size) if scaled else None
    norms = (draw(size, dtype=BF16), draw(size, dtype=BF16)) if normed else None
    cos, sin = draw(NUM_TOKENS, size, dtype=BF16), draw(NUM_TOKENS, size, dtype=BF16)
    query, key, value = (draw(NUM_TOKENS, heads, size, dtype=BF16) for heads in (num_heads, num_kv_heads, num_kv_heads))
    rest = states if added else None
    layer_kernels.turn(states, scales, norms, cos, sin, 1e-6, (query, key, value), rest)
    wide = draw(NUM_TOKENS, count * size + 48, dtype=BF16)
    rests = None if rest is None else (rest, rest)
    layer_kernels.turn_back((query, key, value), states, scales, norms, cos, sin, 1e-6, wide, rests)


def call_blocks() -> None:
    for rank in (8, 16, 64):
        matrices = [draw(rank, 1024), draw(2048, rank)]
        places = [draw(rank, 1024, dtype=BF16), draw(2048, rank, dtype=BF16)]
        block_kernels.Filling(list(zip(matrices, places, (1.0, 2.0), strict=True)))()
        downs, ups = draw(3 * rank, 1024, dtype=BF16), draw(4096, 3 * rank, dtype=BF16)
        of_downs, of_ups = draw(3 * rank, 1024), draw(4096, rank)
        block_kernels.take_apart(downs, ups, [2048, 1024, 1024], 2.0, of_downs, of_ups)
        num_codes, num_scales = 4096 * 1024 // 2, 4096 * 1024 // 64
        stored = (
            *(draw(num_codes, dtype=torch.uint8), draw(16), draw(num_scales, dtype=torch.uint8), draw(256)),
            *(draw(num_scales // 256), draw(num_scales // 256)),
            *(draw(4096, 3 * rank, dtype=BF16), draw(3 * rank, 1024 + 3 * rank, dtype=BF16)),
        )
        packed_kernels.unpack_into(draw(4096 + 3 * rank, 1024 + 3 * rank, dtype=BF16), stored)
    # Its two products are torch's, which takes another dtype for the answer on a GPU alone.
    block_kernels.measure(draw(4096, 1024), draw(48, 1024), draw(4096, 48), draw(4096), draw(4096))


def call_loss() -> None:
    for softcap in (None, 30.0):
        loss_kernel.replace_logits(draw(8, 151936, dtype=BF16), torch.zeros(8, dtype=torch.int64), softcap)


def call_attention() -> None:
    """Each must fit: what spills out of the registers is many times slower, and nobody would see it."""
    starts, ends = torch.zeros(NUM_TOKENS, dtype=torch.int32), torch.zeros(NUM_TOKENS, dtype=torch.int32)
    shapes = [(128, 16, 8), (128, 14, 2), (64, 14, 2), (128, 8, 8)]
    for (size, num_heads, num_kv_heads), (softcap, window) in [
        *((shape, (None, None)) for shape in shapes),
        ((128, 32, 16), (50.0, 4096)),
    ]:
        query, key = (draw(NUM_TOKENS, count, size, dtype=BF16) for count in (num_heads, num_kv_heads))
        scores = attention_tiles.Scores(scale=size**-0.5, softcap=softcap, window=window)
        heads = attention_tiles.Heads(query, key, key.clone(), starts, ends, scores)
        tiles = choose_tiles(heads)
        out, log_sums = attention_tiles.attend(heads, tiles.forward)
        _, alongs = attention_tiles.find_query_gradients(heads, out, query, log_sums, tiles.queries)
        attention_tiles.find_key_gradients(heads, query, log_sums, alongs, tiles.keys)


def count_stack_bytes(binary: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1])


if __name__ == "__main__":
    for given in sys.argv[1:]:
        check_all(int(given))
