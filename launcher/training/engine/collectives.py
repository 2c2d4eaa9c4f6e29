"""Broadcasts from rank 0, and the all-reduce of gradients after a step (`Engine.defer_gradient_sync`).

DDP all-reduces gradient buckets during the backward pass, between kernel launches. A micro-step that is replayed as one
CUDA graph has no such gaps, so its gradients are reduced afterwards, in one message per dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

T = TypeVar("T")


def broadcast_object(accelerator: Accelerator, value: T) -> T:
    """Return rank 0's `value` on every rank."""
    if accelerator.num_processes == 1:
        return value
    values: list[Any] = [value]
    broadcast_object_list(values, from_process=0)
    result: T = values[0]
    return result


def broadcast_weights(parameters: list[nn.Parameter]) -> None:
    """Copy rank 0's weights to all ranks, as DDP does, so that all replicas start with equal weights."""
    _apply_flat(dist.broadcast, [parameter.data for parameter in parameters], src=0)


def all_reduce_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum gradients over all ranks. A missing gradient counts as zero, because all ranks must send the same sizes."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _apply_flat(dist.all_reduce, [parameter.grad for parameter in parameters if parameter.grad is not None])


def _apply_flat(collective: Callable[..., object], tensors: list[Tensor], **options: int) -> None:
    """Run a collective once per dtype, on the concatenation of the tensors, and copy the results into them."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        group = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in group])
        collective(flat, **options)
        parts = flat.split([tensor.numel() for tensor in group])
        torch._foreach_copy_(group, [part.view_as(tensor) for part, tensor in zip(parts, group, strict=True)])


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed torch's generators so that dropout differs between ranks but is reproducible; rank 0 keeps its state.

    `step` is the step at which this rank joins: not 0 if a run is resumed on more ranks than before.
    """
    if rank:
        digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
