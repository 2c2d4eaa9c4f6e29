"""Packs of one split in a memory-mapped Arrow file, one row per pack, read by every rank without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from launcher.corpus.bin_packing import Packing
from launcher.corpus.token_spool import TokenSpool

# Packs per record batch, about one megabyte.
_BATCH_PACKS = 128

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("trained", pa.list_(pa.uint8()), nullable=False),  # 1: this token contributes to the loss
        pa.field("document_lengths", pa.list_(pa.int32()), nullable=False),
        pa.field("rows", pa.list_(pa.int64()), nullable=False),  # row numbers of the documents
        pa.field("num_trained", pa.int32(), nullable=False),
        pa.field("sum_squares", pa.int64(), nullable=False),  # of document lengths: the cost of attention
    ]
)


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents of one sequence, concatenated."""

    input_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.uint8]
    document_lengths: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]


def write_packs(path: Path, spool: TokenSpool, packing: Packing) -> None:
    """Write packs of concatenated documents, without padding."""
    ids, mask = spool.read()
    lengths, rows, trained = spool.lengths, spool.rows, spool.trained
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for begin in range(0, packing.num_packs, _BATCH_PACKS):
            cuts = packing.starts[begin : begin + _BATCH_PACKS + 1]
            chosen = packing.documents[cuts[0] : cuts[-1]]
            pieces = [slice(starts[document], ends[document]) for document in chosen.tolist()]
            writer.write_batch(
                _make_batch(ids, mask, pieces, lengths[chosen], rows[chosen], trained[chosen], cuts - cuts[0])
            )


def _make_batch(
    ids: npt.NDArray[np.int32],
    mask: npt.NDArray[np.uint8],
    pieces: list[slice],
    lengths: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    trained: npt.NDArray[np.int32],
    cuts: npt.NDArray[np.int64],
) -> pa.RecordBatch:
    """Return a record batch; `cuts` are the indices of the first document of each pack."""
    document_ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    token_cuts = pa.array(document_ends[cuts].astype(np.int32))
    document_cuts = pa.array(cuts.astype(np.int32))
    squares = lengths.astype(np.int64) ** 2
    columns = [
        pa.ListArray.from_arrays(token_cuts, pa.array(np.concatenate([ids[piece] for piece in pieces]))),
        pa.ListArray.from_arrays(token_cuts, pa.array(np.concatenate([mask[piece] for piece in pieces]))),
        pa.ListArray.from_arrays(document_cuts, pa.array(lengths)),
        pa.ListArray.from_arrays(document_cuts, pa.array(rows)),
        pa.array(np.add.reduceat(trained, cuts[:-1]).astype(np.int32)),
        pa.array(np.add.reduceat(squares, cuts[:-1]).astype(np.int64)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _view(array: pa.Array) -> npt.NDArray[Any]:
    """Return a NumPy view of an Arrow array, without `to_numpy`, which would import pandas."""
    view: npt.NDArray[Any] = np.from_dlpack(array)
    return view


def _join(arrays: list[pa.Array]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, dtype=np.int64), *map(_view, arrays)]).astype(np.int64)


class PackFile:
    """The packs of a split, open for reading: `file[i]` is pack i, whose arrays are views of the memory map."""

    def __init__(self, path: Path) -> None:
        self._source = pa.memory_map(str(path))
        reader = pa.ipc.open_file(self._source)
        if reader.schema != SCHEMA:
            raise pa.ArrowInvalid(f"{path.name}: not a file of packs")
        self._batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        self._starts = np.concatenate(([0], np.cumsum([batch.num_rows for batch in self._batches]))).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Pack:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, row = self._batches[number], index - int(self._starts[number])
        arrays = (_view(batch.column(column)[row].values) for column in range(4))
        return Pack(*arrays)

    def __iter__(self) -> Iterator[Pack]:
        return (self[index] for index in range(len(self)))

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Return the column `num_trained` or `sum_squares`, with one value per pack."""
        return _join([batch.column(name) for batch in self._batches])

    def count(self, name: str) -> npt.NDArray[np.int64]:
        """Return the number of `input_ids` (tokens) or `document_lengths` (documents) per pack, from the offsets."""
        # Not by value_lengths(), which imports pyarrow.compute.
        cuts = (_view(batch.column(name).offsets) for batch in self._batches)
        return np.concatenate([np.zeros(0, dtype=np.int64), *map(np.diff, cuts)]).astype(np.int64)
