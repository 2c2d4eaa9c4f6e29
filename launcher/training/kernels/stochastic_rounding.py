"""Stochastic rounding of FP32 values to BF16: up or down at random, so that the expected result is the value itself.

The random bits are a function of a key and the element's index, by the hash of seeded_dropout.py: they are the same in
torch and in Triton (stochastic_rounding_triton.py), on every rank, and in a resumed run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.training.kernels.availability import supports_triton

_UINT32_MASK = 0xFFFFFFFF
_LOW_BITS = 0xFFFF  # of an FP32 number, which BF16 does not have


def make_rounding_key(seed: int, step: int, tensor_index: int) -> int:
    """Return the 32-bit key from which the random bits for one tensor in one step are computed."""
    key = 0
    for value in (seed, step, tensor_index):
        key = _mix(key ^ (value * 0x9E3779B1 + 0x7F4A7C15))
    return key


def _mix(bits: int) -> int:
    """Mix the bits of an integer by the finalizer of MurmurHash3."""
    bits &= _UINT32_MASK
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _UINT32_MASK
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _UINT32_MASK
    return bits ^ (bits >> 16)


def round_stochastically(values: Tensor, key: int, start: int = 0) -> Tensor:
    """Round FP32 values [n] to BF16 stochastically; `start` is the index of the first value within its tensor."""
    if supports_triton(values.device):
        from launcher.training.kernels.stochastic_rounding_triton import round_stochastically_triton

        return round_stochastically_triton(values, key, start)
    indices = torch.arange(start, start + values.numel(), device=values.device)
    bits = (indices * 0x9E3779B1 & _UINT32_MASK) ^ key
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _UINT32_MASK
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _UINT32_MASK
    noise = ((bits ^ (bits >> 16)) & _LOW_BITS).to(torch.int32)
    return ((values.view(torch.int32) + noise) & ~_LOW_BITS).view(torch.float32).to(torch.bfloat16)
