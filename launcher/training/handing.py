"""Tensors that the first rank has read, handed to all ranks one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from torch import Tensor

from launcher.training.engine import Engine

T = TypeVar("T")

_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "I8": torch.int8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


class Handed:
    """The tensors of a file that the first rank alone needs to see. Every rank must go through all of them."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine, self._file = engine, file
        self.entries: tuple[Entry, ...] = hand_out(engine.accelerator, _list(file) if engine.is_main else ())

    def __iter__(self) -> Iterator[tuple[Entry, Tensor]]:
        if not self._engine.is_main:
            for entry in self.entries:
                empty = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device=self._engine.device)
                yield entry, self._send(empty)
            return
        with safe_open(str(self._file), framework="pt", device="cpu") as source:
            for entry in self.entries:
                yield entry, self._send(source.get_tensor(entry.name).to(self._engine.device))

    def _send(self, tensor: Tensor) -> Tensor:
        if self._engine.num_ranks > 1:
            torch.distributed.broadcast(tensor, src=0)
        return tensor


def hand_out(accelerator: Accelerator, value: T) -> T:
    """What the first rank knows, on every rank."""
    if accelerator.num_processes == 1:
        return value
    told: list[Any] = [value]
    broadcast_object_list(told, from_process=0)
    result: T = told[0]
    return result


def _list(file: Path) -> tuple[Entry, ...]:
    with safe_open(str(file), framework="pt", device="cpu") as source:
        return tuple(
            Entry(name=name, shape=tuple(piece.get_shape()), dtype=piece.get_dtype())
            for name in sorted(source.keys())
            for piece in [source.get_slice(name)]
        )
