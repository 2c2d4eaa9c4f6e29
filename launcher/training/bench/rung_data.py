"""The rows of a step as a rung's loop takes them: tokenised again or not, padded or packed, in micro-batches.

Every rung trains the documents that the plan's own steps train. Tokenising on the fly does the work again and then
takes the stored tokens, which are the same: so all rungs have the same rows, to the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from launcher.bench.rungs import Setup
from launcher.corpus.packs import Pack, PackFile
from launcher.training.batches import Numbers, PackedBatch, Shape, collate, make_shape


@dataclass(frozen=True, slots=True)
class RungDocument:
    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.uint8]
    texts: tuple[str, ...] = ()  # of which it is tokenised again; empty: it is not


Row = list[RungDocument]  # one document where rows are padded, those of a sequence where they are packed


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Rows of one length, as libraries take them."""

    input_ids: Tensor  # [rows, length]
    position_ids: Tensor  # [rows, length]
    documents: Tensor  # [rows, length]: which document of its row a token belongs to, from 1; 0 is padding
    trained_positions: Tensor  # [trained], in rows laid end to end, whose next token is predicted and counts
    targets: Tensor  # [trained]
    is_packed: bool

    def to(self, device: torch.device) -> RowBatch:
        return self._make([tensor.to(device, non_blocking=True) for tensor in self._tensors()])

    def pin_memory(self) -> RowBatch:
        """DataLoader calls this, by name."""
        return self._make([tensor.pin_memory() for tensor in self._tensors()])

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.input_ids, self.position_ids, self.documents, self.trained_positions, self.targets

    def _make(self, tensors: Sequence[Tensor]) -> RowBatch:
        ids, positions, documents, trained, targets = tensors
        return RowBatch(
            input_ids=ids,
            position_ids=positions,
            documents=documents,
            trained_positions=trained,
            targets=targets,
            is_packed=self.is_packed,
        )


AnyBatch = RowBatch | PackedBatch


@dataclass(kw_only=True)
class RungBatches(Dataset[AnyBatch]):
    """Micro-batch i, counted over all steps that are trained. Made in the training process, or by workers."""

    steps: Sequence[list[Row]]
    setup: Setup
    micro_batch_size: int
    shape: Shape
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        size = self.micro_batch_size
        self._places = [(step, at) for step, rows in enumerate(self.steps) for at in range(0, len(rows), size)]

    def __len__(self) -> int:
        return len(self._places)

    def count_micro_batches(self, step: int) -> int:
        return -(-len(self.steps[step]) // self.micro_batch_size)

    def count_tokens(self, step: int) -> int:
        return _count_tokens(self.steps[step])

    def is_last_of_step(self, index: int) -> bool:
        return index + 1 == len(self) or self._places[index + 1][0] != self._places[index][0]

    def count_micro_batch_tokens(self, index: int) -> int:
        return _count_tokens(self._rows_of(index))

    def count_trained(self, step: int) -> int:
        return sum(int(document.trained.sum()) for row in self.steps[step] for document in row)

    def __getitem__(self, index: int) -> AnyBatch:
        rows = self._rows_of(index)
        for row in rows:
            for document in row:
                tokenise_again(document, self.tokenizer)
        is_packed = self.setup.rows == "packed"
        if self.setup.attention != "planned":
            return make_row_batch(rows, self._find_length(rows), is_packed=is_packed)
        if is_packed:
            empty = [None] * (self.micro_batch_size - len(rows))
            return collate([*map(_join, rows), *empty], self.shape)
        return make_padded_documents(rows, self._find_length(rows))

    def _rows_of(self, index: int) -> list[Row]:
        step, at = self._places[index]
        return self.steps[step][at : at + self.micro_batch_size]

    def _find_length(self, rows: Sequence[Row]) -> int:
        if self.setup.rows == "packed":
            return self.shape.sequence_length
        return max(len(document.ids) for row in rows for document in row)


def _count_tokens(rows: Sequence[Row]) -> int:
    return sum(len(document.ids) for row in rows for document in row)


def make_batches(
    file: PackFile,
    steps: Sequence[tuple[int, ...]],
    setup: Setup,
    micro_batch_size: int,
    sequence_length: int,
    tokenizer: Tokenizer,
) -> RungBatches:
    num_documents: Numbers = file.count("document_lengths")
    with_text = tokenizer if setup.tokenised == "on the fly" else None
    return RungBatches(
        steps=[_make_rows(file, packs, with_text, is_packed=setup.rows == "packed") for packs in steps],
        setup=setup,
        micro_batch_size=micro_batch_size,
        shape=make_shape(num_documents, micro_batch_size, sequence_length, is_packed=True),
        tokenizer=tokenizer,
    )


def _make_rows(file: PackFile, packs: Sequence[int], tokenizer: Tokenizer | None, *, is_packed: bool) -> list[Row]:
    sequences = [[_with_texts(one, tokenizer) for one in cut_documents(file[pack])] for pack in packs]
    return sequences if is_packed else [[document] for sequence in sequences for document in sequence]


def cut_documents(pack: Pack) -> Iterator[RungDocument]:
    for begin, end in pairwise([0, *np.cumsum(pack.document_lengths).tolist()]):
        yield RungDocument(pack.input_ids[begin:end], pack.trained[begin:end])


def _with_texts(document: RungDocument, tokenizer: Tokenizer | None) -> RungDocument:
    """Segments, as the preparation tokenised them: prompt and answer apart."""
    if tokenizer is None:
        return document
    borders = np.flatnonzero(np.diff(document.trained)) + 1
    pieces = np.split(document.ids, borders)
    texts = tuple(tokenizer.decode(piece.tolist(), skip_special_tokens=False) for piece in pieces)
    return RungDocument(document.ids, document.trained, texts)


def tokenise_again(document: RungDocument, tokenizer: Tokenizer) -> list[int]:
    """The work that a loop has which tokenises on the fly, row by row."""
    made: list[int] = []
    for text in document.texts:
        made += tokenizer.encode(text, add_special_tokens=False).ids
    return made


def make_row_batch(rows: Sequence[Row], length: int, *, is_packed: bool) -> RowBatch:
    shape = (len(rows), length)
    ids, positions, owners = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    trained = np.zeros(shape, dtype=np.uint8)
    for place, row in enumerate(rows):
        at = 0
        for number, document in enumerate(row, 1):
            end = at + len(document.ids)
            ids[place, at:end], trained[place, at:end] = document.ids, document.trained
            positions[place, at:end], owners[place, at:end] = np.arange(end - at), number
            at = end
    predicted = np.flatnonzero(trained.reshape(-1))
    return RowBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        documents=torch.from_numpy(owners),
        # A token is predicted from the one before it. The store trains no first token, so that one is in its document.
        trained_positions=torch.from_numpy(predicted - 1),
        targets=torch.from_numpy(ids.reshape(-1)[predicted]),
        is_packed=is_packed,
    )


def make_padded_documents(rows: Sequence[Row], length: int) -> PackedBatch:
    """Padded rows laid end to end for attention that knows where documents end: their padding is computed all the same,
    as documents of its own that nobody sees."""
    batch = make_row_batch(rows, length, is_packed=False)
    borders, lengths = [0], []
    for row in rows:
        real = len(row[0].ids)
        lengths += [real, length - real]
        borders += [borders[-1] + real, borders[-1] + length]
    return PackedBatch(
        input_ids=batch.input_ids.reshape(1, -1),
        position_ids=batch.position_ids.reshape(1, -1),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
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
