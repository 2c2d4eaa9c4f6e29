"""Write checkpoints in shards, for models too large for one host's memory, and read stored tensors one by one.

Every rank writes what it holds with torch.distributed.checkpoint, as safetensors files of limited size. DeepSpeed's
partitions are gathered tensor by tensor and written by rank 0. Both are read by the same reader, which needs no pickle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from launcher.core.errors import InputError, RunFailedError, first_line, hint_for
from launcher.plan.checkpoints import SHARD_BYTES
from launcher.training.checkpoint.state_dict import StateName, collect_own, iterate_optimizer, iterate_weights
from launcher.training.engine.collectives import broadcast_object
from launcher.training.engine.engine import Engine

T = TypeVar("T")

WEIGHTS = "weights/"
OPTIMIZER = "optimizer/"


class ShardWriter:
    """Writes tensors to numbered safetensors files of limited size, holding one file's tensors in memory."""

    def __init__(self, folder: Path, stem: str, limit: int = SHARD_BYTES) -> None:
        self.names: list[list[str]] = []  # of the tensors in each file
        self.num_bytes = 0
        self._folder, self._stem, self._limit = folder, stem, limit
        self._tensors: dict[str, Tensor] = {}
        self._size = 0

    def path(self, index: int) -> Path:
        """Return the path of the file with this index, counted from 0."""
        return self._folder / f"{self._stem}-{index + 1:05d}.safetensors"

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the current file; first write the file if the tensor would exceed its size limit."""
        size = tensor.numel() * tensor.element_size()
        if self._tensors and self._size + size > self._limit:
            self.flush()
        self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._size += size
        self.num_bytes += size

    def flush(self) -> None:
        """Write the tensors that are still in memory."""
        if self._tensors:
            save_file(self._tensors, self.path(len(self.names)), metadata={"format": "pt"})
            self.names.append(list(self._tensors))
            self._tensors, self._size = {}, 0


def write_all(writer: ShardWriter, tensors: Iterable[tuple[str, Tensor]], *, is_main: bool) -> None:
    """Write tensors on rank 0. Every rank iterates over all of them, also after an error of rank 0."""
    iterator = iter(tensors)
    try:
        for name, tensor in iterator:
            if is_main:
                writer.add(name, tensor)
        if is_main:
            writer.flush()
    finally:
        for _ in iterator:
            pass


def save_shards(engine: Engine, folder: Path) -> None:
    """Write weights and optimizer states: each rank its part, with DeepSpeed rank 0 all. Every rank must call it."""
    if engine.is_deepspeed:
        write_all(ShardWriter(folder, _stem(0)), _name_all(engine), is_main=engine.is_main)
    else:
        _save_own(engine, folder)


def check_shared(engine: Engine, folder: Path) -> None:
    """Raise RunFailedError if a rank does not see the folder that rank 0 writes to. Every rank must call it."""
    marker = folder / broadcast_object(engine.accelerator, f".shared-{uuid4().hex}")

    def create() -> None:
        if engine.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            marker.touch()

    try:
        run_together(engine, create)
        seen = run_together(engine, marker.exists)
    except OSError as error:
        raise RunFailedError(f"{folder} cannot be written: {error}", hint=hint_for(error)) from None
    finally:
        if engine.is_main:
            marker.unlink(missing_ok=True)
    if not all(seen):
        raise RunFailedError(
            f"rank {seen.index(False)} does not see {folder} of rank 0, but must write its part of a checkpoint there",
            hint="choose a folder that all nodes share with --runs-dir",
        )


def list_own(engine: Engine, folder: Path) -> list[Path]:
    """List the files that this rank wrote."""
    return sorted(folder.glob(f"{_stem(engine.rank)}-*.safetensors"))


def run_together(engine: Engine, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return all results; a rank's error is raised by all, so that none waits for it."""
    result: Any = None
    problem = ""
    try:
        result = work()
    except (OSError, SafetensorError, InputError) as error:
        problem = error.title if isinstance(error, InputError) else first_line(error)
    except CheckpointException as error:  # a BaseException, which every rank gets
        problem = _get_cause(error)
    outcomes = gather_object([(result, problem)]) if engine.num_ranks > 1 else [(result, problem)]
    for _, problem in outcomes:
        if problem:
            raise OSError(problem)
    return [outcome[0] for outcome in outcomes]


def _stem(rank: int) -> str:
    """Return the prefix of the file names that torch.distributed.checkpoint uses for a rank."""
    return f"shard-{rank + 1:05d}-model"


def _name_all(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in iterate_weights(engine):
        yield f"{WEIGHTS}{name}", tensor
    for state, tensor in iterate_optimizer(engine):
        yield _name_state(state), tensor


def _name_state(state: StateName) -> str:
    return f"{OPTIMIZER}{'/'.join(state)}"


def _save_own(engine: Engine, folder: Path) -> None:
    weights, states = collect_own(engine)
    own = {f"{WEIGHTS}{name}": weight for name, weight in weights.items()}
    own |= {_name_state(state): value for state, value in states.items()}
    files, size = {}, 0
    for name, tensor in own.items():
        files[name] = 1 + size // SHARD_BYTES
        num_shards = tensor.device_mesh.shape[-1] if isinstance(tensor, DTensor) else 1
        size += tensor.numel() * tensor.element_size() // num_shards
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process: "torch.distributed is not initialized"
        save(own, storage_writer=writer, no_dist=engine.num_ranks == 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Name, shape and dtype of a stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


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


class _Reader(HuggingFaceStorageReader):
    """Reader that reads the headers of all files once, instead of once per loaded tensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.metadata


class TensorShards:
    """The tensors of a sharded checkpoint whose names begin with a prefix, each assembled from its shards."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._reader: _Reader | None = None

    def entries(self) -> tuple[TensorEntry, ...]:
        """List the tensors, sorted by name."""
        self._reader = _Reader(self._folder)
        found: list[TensorEntry] = []
        for name, kind in sorted(self._reader.metadata.state_dict_metadata.items()):
            if name.startswith(self._prefix) and isinstance(kind, TensorStorageMetadata):
                if sum(prod(chunk.sizes) for chunk in kind.chunks) != prod(kind.size):
                    raise ValueError(f"the shards of {name} are incomplete")
                own = name.removeprefix(self._prefix)
                found.append(TensorEntry(name=own, shape=tuple(kind.size), dtype=kind.properties.dtype))
        return tuple(found)

    def read(self, entry: TensorEntry) -> Tensor:
        """Read a tensor into host memory, from the shards of all ranks."""
        assert self._reader is not None
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load({f"{self._prefix}{entry.name}": tensor}, storage_reader=self._reader, no_dist=True)
            except CheckpointException as error:  # a BaseException
                raise RuntimeError(f"{entry.name}: {_get_cause(error)}") from None
        return tensor


TensorSource = TensorFile | TensorShards


class BroadcastTensors:
    """Stored tensors that rank 0 reads and broadcasts to all ranks. Every rank must iterate over all of them."""

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


def _get_cause(error: CheckpointException) -> str:
    return first_line(next(iter(error.failures.values()))[0])
