"""Packs -> tensors of fixed shapes. Everything a step needs is computed here, ahead of it, beside the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from launcher.choices import UNPACKED_SIZES
from launcher.corpus.packs import Pack

Numbers = npt.NDArray[np.int64]

_SPREADS = 4  # standard deviations: of random micro-batches, one in ten thousand has more documents
_STEP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch: documents laid end to end in one row, and padding behind them."""

    input_ids: Tensor  # [1, tokens]
    position_ids: Tensor  # [1, tokens], restarting with each document
    cu_seqlens: Tensor  # [documents + 1], int32, filled up to a fixed length with empty documents
    trained_positions: Tensor  # [trained], whose next token is predicted and counts
    targets: Tensor  # [trained]
    max_length: int
    document_lengths: tuple[int, ...]  # on the host: for backends that take documents in groups of like length

    def to(self, device: torch.device) -> PackedBatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedBatch:
        """DataLoader calls this, by name."""
        return self.map(_pin)

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        return PackedBatch(
            input_ids=change(self.input_ids),
            position_ids=change(self.position_ids),
            cu_seqlens=change(self.cu_seqlens),
            trained_positions=change(self.trained_positions),
            targets=change(self.targets),
            max_length=self.max_length,
            document_lengths=self.document_lengths,
        )


def _pin(tensor: Tensor) -> Tensor:
    """By numpy: from 32,769 numbers on torch wakes all its threads to copy them, and takes ten times as long."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What all micro-batches of a split have in common."""

    micro_batch_size: int
    sequence_length: int
    # Documents of a micro-batch, padding included, that its borders are filled up to: nearly all fit the first.
    document_sizes: tuple[int, ...]
    is_packed: bool

    @property
    def max_tokens(self) -> int:
        return self.micro_batch_size * self.sequence_length

    def room_for(self, num_tokens: int) -> int:
        """Tokens that a micro-batch is filled up to."""
        if self.is_packed:
            return self.max_tokens
        size = -(-self.max_tokens // UNPACKED_SIZES)
        return min(self.max_tokens, size * max(1, -(-num_tokens // size)))


def make_shape(num_documents: Numbers, micro_batch_size: int, sequence_length: int, *, is_packed: bool) -> Shape:
    """`num_documents` are those of every pack.

    Attention's cost grows with empty documents too: filled up to the most that could ever meet, a tenth of a step went
    into them. So there are two sizes, what nearly all micro-batches need and what any could, and at most two graphs.
    """
    padding = micro_batch_size  # at most one more document for each slot
    most = int(np.sort(num_documents)[::-1][:micro_batch_size].sum()) + padding
    mean, spread = float(num_documents.mean()), float(num_documents.std())
    usual = ceil((micro_batch_size * mean + _SPREADS * spread * micro_batch_size**0.5 + padding) / _STEP) * _STEP
    return Shape(
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        document_sizes=(usual, most) if usual < most else (most,),
        is_packed=is_packed,
    )


def collate(packs: Sequence[Pack | None], shape: Shape) -> PackedBatch:
    """None is an empty slot. Padding stands in documents of its own at the end: nobody sees it."""
    given = [pack for pack in packs if pack is not None]
    ids = _join([pack.input_ids for pack in given])
    lengths = _join([pack.document_lengths for pack in given])
    trained = np.concatenate([np.zeros(0, dtype=np.uint8), *(pack.trained for pack in given)])
    padding = shape.room_for(len(ids)) - len(ids)
    if padding:
        ids = np.concatenate([ids, np.zeros(padding, dtype=np.int64)])
        lengths = np.concatenate([lengths, _cut_padding(padding, shape.sequence_length)])
    # A token is predicted from the one before it. The store trains no first token, so that one is in its document.
    predicted = np.flatnonzero(trained)
    size = next(size for size in shape.document_sizes if size >= len(lengths))
    cu_seqlens = np.full(size + 1, len(ids), dtype=np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : len(lengths) + 1] = np.cumsum(lengths)
    return PackedBatch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(_positions(lengths))[None],
        cu_seqlens=torch.from_numpy(cu_seqlens),
        trained_positions=torch.from_numpy(predicted - 1),
        targets=torch.from_numpy(ids[predicted]),
        max_length=shape.sequence_length,
        document_lengths=tuple(lengths.tolist()),
    )


def _join(arrays: list[npt.NDArray[np.int32]]) -> Numbers:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])


def _cut_padding(num_tokens: int, longest: int) -> Numbers:
    """No document may be longer than attention was told: it would leave the rest unwritten."""
    whole, rest = divmod(num_tokens, longest)
    return np.array([longest] * whole + [rest] * bool(rest), dtype=np.int64)


def _positions(lengths: Numbers) -> Numbers:
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
