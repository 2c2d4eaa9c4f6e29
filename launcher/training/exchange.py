"""Replicas that compute by themselves: gradients are added up behind a step (`adds_up_behind`), in one message.

DDP sends them in pieces while the backward pass goes on, between kernels that it launches; a micro-step that is
replayed whole (graphs.py) has no between. An adapter's gradients are small, and soon there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def share_weights(parameters: list[nn.Parameter]) -> None:
    """The first rank's, as DDP does: to begin alike must not hang on how each of them drew."""
    _through_one(dist.broadcast, [parameter.data for parameter in parameters], src=0)


def add_up_gradients(parameters: list[nn.Parameter]) -> None:
    """Over all ranks. Who has none counts as zero: messages must be as long everywhere."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _through_one(dist.all_reduce, [parameter.grad for parameter in parameters if parameter.grad is not None])


def _through_one(send: Callable[..., object], tensors: list[Tensor], **options: int) -> None:
    """One message for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])
        send(flat, **options)
        parts = flat.split([tensor.numel() for tensor in alike])
        torch._foreach_copy_(alike, [part.view_as(tensor) for part, tensor in zip(parts, alike, strict=True)])
