"""Which positions an adapter's dropout takes away, by a seed and their place alone.

What a seed says again need not be kept: the way back drops as the way there did. A hash in place of a generator: the
same in Triton (row_kernels.py) and in torch, and cheap enough for each number that is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

_ALL_BITS = 0xFFFFFFFF
STEPS = 1 << 24  # a rate is a whole number of such
LARGEST_SEED = 2**31 - 1


class Dropping(NamedTuple):
    """Of one input of some matrices."""

    seed: Tensor  # [1], int32
    rate: float

    @property
    def threshold(self) -> int:
        return round(self.rate * STEPS)


def find_factors(shape: torch.Size, dropping: Dropping) -> Tensor:
    """Of each number: zero, or what those that stay are multiplied by. In FP32."""
    places = torch.arange(shape.numel(), device=dropping.seed.device)
    found = (places * 0x9E3779B1 & _ALL_BITS) ^ dropping.seed.to(torch.int64)
    found = (found ^ (found >> 16)) * 0x85EBCA6B & _ALL_BITS
    found = (found ^ (found >> 13)) * 0xC2B2AE35 & _ALL_BITS
    stays = ((found ^ (found >> 16)) >> 8) >= dropping.threshold
    return (stays / (1 - dropping.rate)).view(shape)


class DropBySeed(nn.Module):
    """In place of torch's dropout, where two ways of computing must drop alike."""

    def __init__(self, p: float, seed: int) -> None:
        super().__init__()
        self.p, self.seed = p, seed

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        dropping = Dropping(torch.tensor([self.seed], dtype=torch.int32, device=x.device), self.p)
        return x * find_factors(x.shape, dropping).to(x.dtype)


def draw_seeds(module: nn.Module, count: int, device: torch.device) -> Tensor:
    """By torch's generator, whose state is a part of every checkpoint."""
    if isinstance(module, DropBySeed):
        return torch.full((count,), module.seed, dtype=torch.int32, device=device)
    return torch.randint(0, LARGEST_SEED, (count,), dtype=torch.int32, device=device)
