"""Collate packs on the CPU into micro-batches of fixed shapes, with all tensors that a training step needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from launcher.core.choices import UNPACKED_SIZES
from launcher.corpus.pack_file import Pack

IntArray = npt.NDArray[np.int64]

_DEVIATIONS = 4  # standard deviations: one random micro-batch in ten thousand has more documents
_ROUNDING = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch: packed documents in one row, then padding."""

    input_ids: Tensor  # [1, tokens]
    position_ids: Tensor  # [1, tokens], restarting with each document
    cu_seqlens: Tensor  # [documents + 1], int32, padded to a fixed length with empty documents
    trained_positions: Tensor  # [trained], positions whose next token is a target
    targets: Tensor  # [trained]
    max_length: int
    document_lengths: tuple[int, ...]  # on the host, for backends that group documents by length

    def to(self, device: torch.device) -> PackedBatch:
        """Copy all tensors to a device, without waiting."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedBatch:
        """Copy all tensors to pinned memory. The DataLoader calls this by name."""
        return self.map(_pin)

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        """Return a batch with a function applied to every tensor."""
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
    """Copy a tensor to pinned memory by numpy: torch would use all threads above 32,768 elements, ten times slower."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The shape that all micro-batches of a split share."""

    micro_batch_size: int
    sequence_length: int
    # Numbers of documents, padding included, that cu_seqlens is padded to. Nearly all micro-batches fit the first.
    document_sizes: tuple[int, ...]
    is_packed: bool

    @property
    def max_tokens(self) -> int:
        """Tokens of a full micro-batch."""
        return self.micro_batch_size * self.sequence_length

    def padded_length(self, num_tokens: int) -> int:
        """Return the number of tokens that a micro-batch is padded to."""
        if self.is_packed:
            return self.max_tokens
        size = -(-self.max_tokens // UNPACKED_SIZES)
        return min(self.max_tokens, size * max(1, -(-num_tokens // size)))


def choose_batch_shape(
    num_documents: IntArray, micro_batch_size: int, sequence_length: int, *, is_packed: bool
) -> BatchShape:
    """Choose the shape of micro-batches from the number of documents in every pack.

    Empty documents cost attention time: padding cu_seqlens to the largest possible number took a tenth of a step.
    cu_seqlens therefore has one of two lengths, the usual or the largest possible one, so there are at most two graphs.
    """
    padding = micro_batch_size  # at most one more document per slot
    largest = int(np.sort(num_documents)[::-1][:micro_batch_size].sum()) + padding
    mean, deviation = float(num_documents.mean()), float(num_documents.std())
    expected = micro_batch_size * mean + _DEVIATIONS * deviation * micro_batch_size**0.5 + padding
    usual = ceil(expected / _ROUNDING) * _ROUNDING
    return BatchShape(
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        document_sizes=(usual, largest) if usual < largest else (largest,),
        is_packed=is_packed,
    )


def collate(packs: Sequence[Pack | None], shape: BatchShape) -> PackedBatch:
    """Collate packs into one micro-batch; None is an empty slot. Padding forms separate documents at the end."""
    present = [pack for pack in packs if pack is not None]
    ids = _join([pack.input_ids for pack in present])
    lengths = _join([pack.document_lengths for pack in present])
    trained = np.concatenate([np.zeros(0, dtype=np.uint8), *(pack.trained for pack in present)])
    padding = shape.padded_length(len(ids)) - len(ids)
    if padding:
        ids = np.concatenate([ids, np.zeros(padding, dtype=np.int64)])
        lengths = np.concatenate([lengths, _split_padding(padding, shape.sequence_length)])
    # A token is predicted from the previous one. The store never trains a document's first token, so the previous one
    # belongs to the same document.
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


def collate_lengths(document_lengths: tuple[int, ...]) -> PackedBatch:
    """Return a batch of documents with the given lengths and arbitrary tokens, to check attention backends."""
    total, lengths = sum(document_lengths), np.array(document_lengths, dtype=np.int32)
    zeros = np.zeros(total, dtype=np.int32)
    pack = Pack(zeros, np.ones(total, dtype=np.uint8), lengths, np.zeros(len(lengths), dtype=np.int64))
    shape = BatchShape(micro_batch_size=1, sequence_length=total, document_sizes=(len(lengths),), is_packed=True)
    return collate([pack], shape)


def _join(arrays: list[npt.NDArray[np.int32]]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])


def _split_padding(num_tokens: int, max_length: int) -> IntArray:
    """Return the lengths of padding documents, at most `max_length` each: attention writes no output beyond it."""
    full, rest = divmod(num_tokens, max_length)
    return np.array([max_length] * full + [rest] * bool(rest), dtype=np.int64)


def _positions(lengths: IntArray) -> IntArray:
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
