"""Broadcasts from rank 0, and the all-reduce of gradients after a step (`Engine.defer_gradient_sync`).

DDP all-reduces gradient buckets during the backward pass, between kernel launches. A micro-step that is replayed as one
CUDA graph has no such gaps, so its gradients are reduced afterwards, in one message per dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from torch import Tensor, nn

if TYPE_CHECKING:
    from launcher.training.engine.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Name, shape and dtype of a stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorSource(Protocol):
    """Stored tensors that are read one by one."""

    def entries(self) -> tuple[TensorEntry, ...]:
        """List the tensors, sorted by name."""
        ...

    def read(self, entry: TensorEntry) -> Tensor:
        """Read a tensor into host memory."""
        ...


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The tensors of a safetensors file."""

    file: Path

    def entries(self) -> tuple[TensorEntry, ...]:
        """List the tensors, sorted by name."""
        with safe_open(str(self.file), framework="pt", device="cpu") as source:
            tensors = {name: source.get_tensor(name) for name in sorted(source.keys())}  # mapped, not read
        return tuple(
            TensorEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()
        )

    def read(self, entry: TensorEntry) -> Tensor:
        """Read a tensor into host memory."""
        with safe_open(str(self.file), framework="pt", device="cpu") as source:
            tensor: Tensor = source.get_tensor(entry.name)
            return tensor


class BroadcastTensors:
    """Stored tensors that only rank 0 needs to read. Every rank must iterate over all of them."""

    def __init__(self, engine: Engine, source: TensorSource) -> None:
        self._engine, self._source = engine, source
        self.entries: tuple[TensorEntry, ...] = broadcast_object(
            engine.accelerator, source.entries() if engine.is_main else ()
        )

    def __iter__(self) -> Iterator[tuple[TensorEntry, Tensor]]:
        engine = self._engine
        for entry in self.entries:
            if engine.is_main:
                tensor = self._source.read(entry).to(engine.device)
            else:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=engine.device)
            if engine.num_ranks > 1:
                dist.broadcast(tensor, src=0)
            yield entry, tensor


def broadcast_object(accelerator: Accelerator, value: T) -> T:
    """Return rank 0's `value` on every rank."""
    if accelerator.num_processes == 1:
        return value
    values: list[Any] = [value]
    broadcast_object_list(values, from_process=0)
    result: T = values[0]
    return result


def broadcast_weights(parameters: list[nn.Parameter]) -> None:
    """Copy rank 0's weights to all ranks, as DDP does, so that replicas start equal whatever each rank drew."""
    _apply_flat(dist.broadcast, [parameter.data for parameter in parameters], src=0)


def all_reduce_gradients(parameters: list[nn.Parameter]) -> None:
    """Sum gradients over all ranks. A missing gradient counts as zero, because all ranks must send the same sizes."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _apply_flat(dist.all_reduce, [parameter.grad for parameter in parameters if parameter.grad is not None])


def _apply_flat(collective: Callable[..., object], tensors: list[Tensor], **options: int) -> None:
    """Run a collective on all tensors, as one flat tensor per dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        group = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in group])
        collective(flat, **options)
        parts = flat.split([tensor.numel() for tensor in group])
        torch._foreach_copy_(group, [part.view_as(tensor) for part, tensor in zip(parts, group, strict=True)])


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed torch's generators so that dropout differs between ranks, by the seed alone; rank 0 keeps its state.

    `step`: where a rank begins that did not exist before.
    """
    if rank:
        digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
