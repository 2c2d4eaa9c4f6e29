"""Dropout whose mask is a function of a seed and the element's index, so that the mask is never stored.

The backward pass recomputes the mask from the seed. The mask comes from an integer hash (the finalizer of MurmurHash3)
instead of a random generator: it is the same in torch and in Triton (rmsnorm_dropout_triton.py), and cheap enough to
compute for every element that is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

_UINT32_MASK = 0xFFFFFFFF
RATE_STEPS = 1 << 24  # resolution of the dropout probability: 24 bits of the hash are compared with it
MAX_SEED = 2**31 - 1


class DropoutSeed(NamedTuple):
    """Seed and probability that determine the dropout mask of one input tensor."""

    seed: Tensor  # [1], int32
    rate: float

    @property
    def threshold(self) -> int:
        """Elements whose 24-bit hash is below this number are dropped."""
        return round(self.rate * RATE_STEPS)


def compute_dropout_mask(shape: torch.Size, dropout: DropoutSeed) -> Tensor:
    """Return the scaled dropout mask in fp32: 0 for dropped elements, 1 / (1 - p) for the others."""
    indices = torch.arange(shape.numel(), device=dropout.seed.device)
    bits = (indices * 0x9E3779B1 & _UINT32_MASK) ^ dropout.seed.to(torch.int64)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _UINT32_MASK
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _UINT32_MASK
    is_kept = ((bits ^ (bits >> 16)) >> 8) >= dropout.threshold
    return (is_kept / (1 - dropout.rate)).view(shape)


class SeededDropout(nn.Module):
    """Drop-in replacement of nn.Dropout with a fixed seed, to compare two implementations under the same mask."""

    def __init__(self, p: float, seed: int) -> None:
        super().__init__()
        self.p, self.seed = p, seed

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mask of the seed, in training mode only."""
        if not self.training:
            return x
        dropout = DropoutSeed(torch.tensor([self.seed], dtype=torch.int32, device=x.device), self.p)
        return x * compute_dropout_mask(x.shape, dropout).to(x.dtype)


def draw_seeds(module: nn.Module, count: int, device: torch.device) -> Tensor:
    """Return `count` seeds from torch's generator, whose state is part of every checkpoint."""
    if isinstance(module, SeededDropout):
        return torch.full((count,), module.seed, dtype=torch.int32, device=device)
    return torch.randint(0, MAX_SEED, (count,), dtype=torch.int32, device=device)
