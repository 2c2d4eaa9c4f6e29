"""Documents -> token ids and masks, in batches on all cores, while the next rows are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from launcher.corpus.documents import Document

# Large enough to keep all cores busy, small enough that a batch of long rows stays in memory.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 8_000_000


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Documents laid end to end."""

    input_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    num_cut: int  # documents longer than the limit
    num_cut_tokens: int


def tokenise(documents: Iterable[Document], tokenizer: Tokenizer, max_length: int) -> Iterator[TokenBatch]:
    """Segments are tokenised apart: at inference the prompt is, too, so the model sees the same tokens."""
    with ThreadPoolExecutor(1) as executor:  # Rust releases the interpreter: rows are read while tokens are made
        waiting: Future[TokenBatch] | None = None
        for batch in _batches(documents):
            upcoming = executor.submit(_encode, batch, tokenizer, max_length)
            if waiting is not None:
                yield waiting.result()
            waiting = upcoming
        if waiting is not None:
            yield waiting.result()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += sum(len(segment.text) for segment in document.segments)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(batch: Sequence[Document], tokenizer: Tokenizer, max_length: int) -> TokenBatch:
    segments = [segment for document in batch for segment in document.segments]
    encodings = tokenizer.encode_batch_fast([segment.text for segment in segments], add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    sizes = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    input_ids = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(sizes.sum()))
    flags = np.fromiter((segment.is_trained for segment in segments), dtype=np.uint8, count=len(segments))
    trained = np.repeat(flags, sizes)
    pieces = np.fromiter((len(document.segments) for document in batch), dtype=np.int64, count=len(batch))
    lengths = np.add.reduceat(sizes, np.concatenate(([0], np.cumsum(pieces)[:-1]))) if len(batch) else sizes
    return _cut(input_ids, trained, lengths, np.array([document.row for document in batch], dtype=np.int64), max_length)


def _cut(
    input_ids: npt.NDArray[np.int32],
    trained: npt.NDArray[np.uint8],
    lengths: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    max_length: int,
) -> TokenBatch:
    """What is beyond the limit is cut off at the end."""
    kept = np.minimum(lengths, max_length)
    excess = lengths - kept
    if excess.any():
        starts = np.cumsum(lengths) - lengths
        inside = np.arange(len(input_ids)) - np.repeat(starts, lengths) < max_length
        input_ids, trained = input_ids[inside], trained[inside]
    return TokenBatch(input_ids, trained, kept.astype(np.int32), rows, int((excess > 0).sum()), int(excess.sum()))
