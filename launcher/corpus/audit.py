"""Audit of prepared data: counts collected during preparation, stored with the packs and printed as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from launcher.core.frozen_model import Frozen
from launcher.corpus.bin_packing import Packing
from launcher.corpus.documents import Document
from launcher.corpus.rows import Rejections
from launcher.corpus.templates import Template
from launcher.corpus.token_spool import TokenSpool

_HISTOGRAM_BINS = 12

Hashes = npt.NDArray[np.uint64]


class SampleSegment(Frozen):
    """Piece of the sample document's text, with or without loss."""

    text: str
    is_trained: bool


class SplitAudit(Frozen):
    """Statistics of one split: its rows, documents, tokens and packs."""

    num_rows: int  # rows read, usable or not
    num_documents: int
    rejected: dict[str, int]
    rejected_places: dict[str, tuple[int, ...]]
    num_tokens: int
    num_trained: int
    num_cut: int
    num_cut_tokens: int
    num_untrained: int  # documents dropped because they have no trained tokens
    num_duplicates: int
    num_known: int  # documents of a held-out split whose prompt also occurs in the training split
    num_ends_trained: int
    num_with_controls: int = 0  # documents with the text of a control token in a field
    num_untrained_answers: int = 0  # answers whose place in the rendered text was not found
    shared_system: str = ""  # the system message, if all rows that were read for the split have the same
    histogram: tuple[tuple[int, int], ...]  # (upper bound in tokens, number of documents)
    mean_length: float
    max_length: int
    num_packs: int
    capacity: int

    @property
    def trained_share(self) -> float:
        """Share of the tokens that contribute to the loss."""
        return self.num_trained / max(1, self.num_tokens)

    @property
    def packing_efficiency(self) -> float:
        """Share of the packs' total capacity that is filled with tokens."""
        return self.num_tokens / max(1, self.num_packs * self.capacity)


class Audit(Frozen):
    """Audit of prepared data: the statistics of each split, a sample document and notes."""

    schema_version: Literal[1] = 1
    template: str
    loss_on: str
    is_packed: bool
    splits: dict[str, SplitAudit]
    sample: tuple[SampleSegment, ...]
    notes: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows in all splits."""
        return sum(split.num_rows for split in self.splits.values())

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all splits."""
        return sum(split.num_tokens for split in self.splits.values())


def make_split_audit(
    num_rows: int,
    rejections: Rejections,
    spool: TokenSpool,
    packing: Packing,
    capacity: int,
    known: Hashes | None = None,
) -> SplitAudit:
    """Return the statistics of a split; `known` are the training split's prompt hashes, to count shared prompts."""
    lengths = spool.lengths
    return SplitAudit(
        num_rows=num_rows,
        num_documents=len(lengths),
        rejected=dict(rejections.counts),
        rejected_places={reason: tuple(places) for reason, places in rejections.places.items()},
        num_tokens=int(lengths.sum(dtype=np.int64)),
        num_trained=int(spool.trained.sum(dtype=np.int64)),
        num_cut=spool.num_cut,
        num_cut_tokens=spool.num_cut_tokens,
        num_untrained=spool.num_untrained,
        num_duplicates=spool.num_duplicates,
        num_known=0 if known is None else int(np.isin(spool.prompt_hashes, known).sum()),
        num_ends_trained=spool.num_ends_trained,
        num_with_controls=spool.num_with_controls,
        num_untrained_answers=spool.num_untrained_answers,
        histogram=_make_histogram(lengths, capacity),
        mean_length=float(lengths.mean()) if len(lengths) else 0.0,
        max_length=int(lengths.max()) if len(lengths) else 0,
        num_packs=packing.num_packs,
        capacity=capacity,
    )


def _make_histogram(lengths: np.ndarray[tuple[int], np.dtype[np.int32]], capacity: int) -> tuple[tuple[int, int], ...]:
    edges = np.unique(np.linspace(0, capacity, _HISTOGRAM_BINS + 1).astype(int))
    counts, _ = np.histogram(lengths, bins=edges)
    return tuple((int(edge), int(count)) for edge, count in zip(edges[1:], counts, strict=True))


def make_sample(document: Document | None, template: Template) -> tuple[SampleSegment, ...]:
    """Return the segments of a sample document, with and without loss; empty if there is no document."""
    if document is None:
        return ()
    unescape = template.controls.unescape
    return tuple(
        SampleSegment(text=unescape(segment.text), is_trained=segment.is_trained) for segment in document.segments
    )


def make_notes(splits: Mapping[str, SplitAudit]) -> tuple[str, ...]:
    """Return warnings about the data, which should be read before training."""
    notes = []
    for name, split in splits.items():
        if not split.num_documents:
            notes.append(f"{name}: no documents, because there are too few rows to hold any out")
        if split.num_documents and split.num_ends_trained < split.num_documents:
            missing = split.num_documents - split.num_ends_trained
            notes.append(
                f"{name}: {missing:,} documents never train the end token (truncated, or without the end of an answer)"
            )
        if split.num_untrained_answers:
            notes.append(
                f"{name}: {split.num_untrained_answers:,} answers are not trained: they cannot be found in the text "
                "that the chat template renders"
            )
        if split.num_with_controls:
            notes.append(
                f"{name}: {split.num_with_controls:,} documents have the text of a control token, such as <|im_end|>, "
                "in a field: it is encoded as ordinary text"
            )
        if split.num_cut:
            notes.append(f"{name}: {split.num_cut:,} documents are longer than max_seq_length and were truncated")
        if split.num_duplicates:
            are = "document is an exact duplicate" if split.num_duplicates == 1 else "documents are exact duplicates"
            notes.append(f"{name}: {split.num_duplicates:,} {are}")
        if split.num_known:
            known = f"{split.num_known:,} of {split.num_documents:,} documents"
            useless = "; its loss does not measure generalization" if 2 * split.num_known > split.num_documents else ""
            notes.append(f"{name}: {known} have a prompt that also occurs in the training split{useless}")
    return tuple(notes)
