"""Micro-batches of an ablation stage: tokenized on the fly or before, padded or packed.

Every stage trains the same documents as the plan's own steps. Tokenizing on the fly repeats the work and then uses the
stored tokens, which are equal, so that all stages train exactly the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from launcher.bench.ablation_stages import LoopConfig
from launcher.corpus.pack_file import Pack, PackFile
from launcher.training.data.collate import BatchShape, IntArray, PackedBatch, choose_batch_shape, collate


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a packed sequence: its tokens, and which of them count in the loss."""

    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.uint8]
    texts: tuple[str, ...] = ()  # to be tokenized on the fly; empty: tokenized before


Row = list[Document]  # one document if padded, the documents of a sequence if packed


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Micro-batch of rows of equal length, in the format of transformers."""

    input_ids: Tensor  # [rows, length]
    position_ids: Tensor  # [rows, length]
    documents: Tensor  # [rows, length]: number of the document within its row, from 1; 0 is padding
    trained_positions: Tensor  # [trained]: flat positions whose next token counts in the loss
    targets: Tensor  # [trained]
    is_packed: bool

    def to(self, device: torch.device) -> RowBatch:
        """Copy to a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> RowBatch:
        """Pin the tensors; called by DataLoader."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> RowBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: Any = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed)


AnyBatch = RowBatch | PackedBatch


@dataclass(kw_only=True)
class StageBatches(Dataset[AnyBatch]):
    """Map-style dataset of an ablation stage's micro-batches, numbered consecutively over all steps."""

    steps: Sequence[list[Row]]
    config: LoopConfig
    micro_batch_size: int
    shape: BatchShape
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        """List the step and the first row of each micro-batch."""
        size = self.micro_batch_size
        self._offsets = [(step, row) for step, rows in enumerate(self.steps) for row in range(0, len(rows), size)]

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return len(self._offsets)

    def count_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step."""
        return -(-len(self.steps[step]) // self.micro_batch_size)

    def count_tokens(self, step: int) -> int:
        """Return the tokens of a step, without padding."""
        return _count_tokens(self.steps[step])

    def is_last_of_step(self, index: int) -> bool:
        """Return whether the step ends with this micro-batch."""
        return index + 1 == len(self) or self._offsets[index + 1][0] != self._offsets[index][0]

    def count_micro_batch_tokens(self, index: int) -> int:
        """Return the tokens of a micro-batch, without padding."""
        return _count_tokens(self._get_rows(index))

    def count_trained(self, step: int) -> int:
        """Return the tokens of a step that count in the loss."""
        return sum(int(document.trained.sum()) for row in self.steps[step] for document in row)

    def __getitem__(self, index: int) -> AnyBatch:
        """Build a micro-batch, in the training process or in a loader worker."""
        rows = self._get_rows(index)
        for row in rows:
            for document in row:
                tokenize(document, self.tokenizer)
        is_packed = self.config.rows == "packed"
        if self.config.attention != "planned":
            return make_row_batch(rows, self._get_length(rows), is_packed=is_packed)
        if is_packed:
            empty = [None] * (self.micro_batch_size - len(rows))
            return collate([*map(_join, rows), *empty], self.shape)
        return make_padded_documents(rows, self._get_length(rows))

    def _get_rows(self, index: int) -> list[Row]:
        step, row = self._offsets[index]
        return self.steps[step][row : row + self.micro_batch_size]

    def _get_length(self, rows: Sequence[Row]) -> int:
        if self.config.rows == "packed":
            return self.shape.sequence_length
        return max(len(document.ids) for row in rows for document in row)


def _count_tokens(rows: Sequence[Row]) -> int:
    return sum(len(document.ids) for row in rows for document in row)


def make_batches(
    file: PackFile,
    steps: Sequence[tuple[int, ...]],
    config: LoopConfig,
    micro_batch_size: int,
    sequence_length: int,
    tokenizer: Tokenizer,
) -> StageBatches:
    """Read the packs of the given steps and split them into micro-batches."""
    num_documents: IntArray = file.count("document_lengths")
    on_the_fly = tokenizer if config.tokenization == "on the fly" else None
    return StageBatches(
        steps=[_make_rows(file, packs, on_the_fly, is_packed=config.rows == "packed") for packs in steps],
        config=config,
        micro_batch_size=micro_batch_size,
        shape=choose_batch_shape(num_documents, micro_batch_size, sequence_length, is_packed=True),
        tokenizer=tokenizer,
    )


def _make_rows(file: PackFile, packs: Sequence[int], tokenizer: Tokenizer | None, *, is_packed: bool) -> list[Row]:
    sequences = [[_add_texts(document, tokenizer) for document in split_documents(file[pack])] for pack in packs]
    return sequences if is_packed else [[document] for sequence in sequences for document in sequence]


def split_documents(pack: Pack) -> Iterator[Document]:
    """Split a pack into its documents."""
    for begin, end in pairwise([0, *np.cumsum(pack.document_lengths).tolist()]):
        yield Document(pack.input_ids[begin:end], pack.trained[begin:end])


def _add_texts(document: Document, tokenizer: Tokenizer | None) -> Document:
    """Return a document with its prompt and answer decoded to texts; unchanged if `tokenizer` is None."""
    if tokenizer is None:
        return document
    segments = np.split(document.ids, np.flatnonzero(np.diff(document.trained)) + 1)
    texts = tuple(tokenizer.decode(segment.tolist(), skip_special_tokens=False) for segment in segments)
    return Document(document.ids, document.trained, texts)


def tokenize(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Tokenize the texts of a document, as a training loop does that tokenizes on the fly; empty if it has no texts."""
    ids: list[int] = []
    for text in document.texts:
        ids += tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def make_row_batch(rows: Sequence[Row], length: int, *, is_packed: bool) -> RowBatch:
    """Build a micro-batch from rows of documents, each padded to `length`."""
    shape = (len(rows), length)
    ids, positions, owners = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    trained = np.zeros(shape, dtype=np.uint8)
    for index, row in enumerate(rows):
        begin = 0
        for number, document in enumerate(row, 1):
            end = begin + len(document.ids)
            ids[index, begin:end], trained[index, begin:end] = document.ids, document.trained
            positions[index, begin:end], owners[index, begin:end] = np.arange(end - begin), number
            begin = end
    predicted = np.flatnonzero(trained.reshape(-1))
    return RowBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        documents=torch.from_numpy(owners),
        # A token is predicted from its predecessor; first tokens are never trained, so both are in the same document.
        trained_positions=torch.from_numpy(predicted - 1),
        targets=torch.from_numpy(ids.reshape(-1)[predicted]),
        is_packed=is_packed,
    )


def make_padded_documents(rows: Sequence[Row], length: int) -> PackedBatch:
    """Concatenate padded rows for varlen attention; the padding of each row is a document without trained tokens."""
    batch = make_row_batch(rows, length, is_packed=False)
    cu_seqlens, lengths = [0], []
    for row in rows:
        num_tokens = len(row[0].ids)
        lengths += [num_tokens, length - num_tokens]
        cu_seqlens += [cu_seqlens[-1] + num_tokens, cu_seqlens[-1] + length]
    return PackedBatch(
        input_ids=batch.input_ids.reshape(1, -1),
        position_ids=batch.position_ids.reshape(1, -1),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        trained_positions=batch.trained_positions,
        targets=batch.targets,
        max_length=length,
        document_lengths=tuple(lengths),
    )


def _join(row: Row) -> Pack:
    return Pack(
        np.concatenate([document.ids for document in row]),
        np.concatenate([document.trained for document in row]),
        np.array([len(document.ids) for document in row], dtype=np.int32),
        np.zeros(len(row), dtype=np.int64),
    )
