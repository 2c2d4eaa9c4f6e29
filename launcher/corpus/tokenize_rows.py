"""Tokenize documents in batches on all cores, while the next rows are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from launcher.corpus.documents import Document
from launcher.corpus.text_encoder import TextEncoder

# Large enough to keep all cores busy, small enough that a batch of long rows stays in memory.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 8_000_000


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokenized documents, concatenated."""

    input_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    prompt_hashes: npt.NDArray[np.uint64]
    excess: npt.NDArray[np.int64]  # truncated tokens
    # Per document: whether a field contains the text of a control token, and the number of answers that are not found.
    findings: npt.NDArray[np.int64] | None = None

    def select(self, chosen: npt.NDArray[np.bool_]) -> TokenBatch:
        """Return a batch of the documents that the mask `chosen` selects."""
        positions = np.repeat(chosen, self.lengths)
        return TokenBatch(
            self.input_ids[positions],
            self.trained[positions],
            self.lengths[chosen],
            self.rows[chosen],
            self.prompt_hashes[chosen],
            self.excess[chosen],
            None if self.findings is None else self.findings[chosen],
        )


def tokenize_documents(documents: Iterable[Document], encoder: TextEncoder, max_length: int) -> Iterator[TokenBatch]:
    """Tokenize documents, each as a whole, and mask the tokens of segments that are not trained."""
    with ThreadPoolExecutor(1) as executor:  # Rust releases the GIL: rows are read while others are tokenized
        waiting: Future[TokenBatch] | None = None
        for batch in _batches(documents):
            upcoming = executor.submit(_encode, batch, encoder, max_length)
            if waiting is not None:
                yield waiting.result()
            waiting = upcoming
        if waiting is not None:
            yield waiting.result()


def tokenize_here(documents: Iterable[Document], encoder: TextEncoder, max_length: int) -> list[TokenBatch]:
    """Tokenize documents in this thread."""
    return [_encode(batch, encoder, max_length) for batch in _batches(documents)]


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


def _encode(batch: Sequence[Document], encoder: TextEncoder, max_length: int) -> TokenBatch:
    segments = [segment for document in batch for segment in document.segments]
    encoded = encoder.encode([document.segments for document in batch])
    input_ids = np.frombuffer(b"".join(encoded), dtype=np.int32)
    sizes = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)) // input_ids.itemsize
    flags = np.fromiter((segment.is_trained for segment in segments), dtype=np.uint8, count=len(segments))
    trained = np.repeat(flags, sizes)
    pieces = np.fromiter((len(document.segments) for document in batch), dtype=np.int64, count=len(batch))
    lengths = np.add.reduceat(sizes, np.concatenate(([0], np.cumsum(pieces)[:-1]))) if len(batch) else sizes
    # The first token of a document has no context to be predicted from.
    trained[(np.cumsum(lengths) - lengths)[lengths > 0]] = 0
    inside, kept = _cut(lengths, max_length)
    return TokenBatch(
        input_ids[inside],
        trained[inside],
        kept.astype(np.int32),
        np.array([document.row for document in batch], dtype=np.int64),
        np.array([document.prompt_hash for document in batch], dtype=np.uint64),
        lengths - kept,
        np.array([(document.has_controls, document.num_untrained_answers) for document in batch], dtype=np.int64),
    )


def _cut(
    lengths: npt.NDArray[np.int64], max_length: int
) -> tuple[slice | npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return an index of the tokens that remain when documents are truncated to `max_length`, and the new lengths."""
    kept = np.minimum(lengths, max_length)
    if (kept == lengths).all():
        return slice(None), kept
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths) < max_length, kept
