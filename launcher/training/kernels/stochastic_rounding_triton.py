"""Triton kernel of stochastic_rounding.py: one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit(do_not_specialize=["key", "start", "numel"])  # type: ignore[untyped-decorator]
def _round_kernel(values, rounded, key, start, numel, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < numel
    bits = (start + offsets).to(tl.uint32) * 0x9E3779B1
    bits = bits ^ key.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    noise = (bits ^ (bits >> 16)) & 0xFFFF
    value = tl.load(values + offsets, mask=mask).to(tl.uint32, bitcast=True)
    value = (value + noise) & 0xFFFF0000
    tl.store(rounded + offsets, value.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)


def round_stochastically_triton(values: Tensor, key: int, start: int) -> Tensor:
    """Return FP32 values [n] in BF16, with the same bits as `round_stochastically` in torch."""
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    signed = key - (1 << 32) if key >> 31 else key  # as an int32
    numel = values.numel()
    _round_kernel[(triton.cdiv(numel, _BLOCK),)](values, rounded, signed, start, numel, block=_BLOCK)
    return rounded
