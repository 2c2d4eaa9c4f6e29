"""What the data is, before it is trained on: counted while preparing, stored beside the packs, shown as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from launcher.corpus.documents import Document
from launcher.corpus.pack import Packing
from launcher.corpus.rows import Rejections
from launcher.corpus.spool import Spool
from launcher.values import Frozen

_HISTOGRAM_BINS = 12

Hashes = npt.NDArray[np.uint64]


class SampleSegment(Frozen):
    text: str
    is_trained: bool


class SplitAudit(Frozen):
    num_rows: int  # read, usable or not
    num_documents: int
    rejected: dict[str, int]
    rejected_places: dict[str, tuple[int, ...]]
    num_tokens: int
    num_trained: int
    num_cut: int
    num_cut_tokens: int
    num_untrained: int  # documents dropped because nothing in them would be trained
    num_duplicates: int
    num_known: int  # documents of a held-out split whose prompt a training document has, too
    num_ends_trained: int
    histogram: tuple[tuple[int, int], ...]  # (upper end in tokens, documents)
    mean_length: float
    max_length: int
    num_packs: int
    capacity: int

    @property
    def trained_share(self) -> float:
        return self.num_trained / max(1, self.num_tokens)

    @property
    def packing_efficiency(self) -> float:
        return self.num_tokens / max(1, self.num_packs * self.capacity)


class Audit(Frozen):
    schema_version: Literal[1] = 1
    template: str
    loss_on: str
    is_packed: bool
    splits: dict[str, SplitAudit]
    sample: tuple[SampleSegment, ...]
    notes: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return sum(split.num_rows for split in self.splits.values())

    @property
    def num_tokens(self) -> int:
        return sum(split.num_tokens for split in self.splits.values())


def make_split_audit(
    num_rows: int, rejections: Rejections, spool: Spool, packing: Packing, capacity: int, known: Hashes | None = None
) -> SplitAudit:
    """`known`: the prompts of the training documents, for a split that is held out."""
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


def make_sample(document: Document | None) -> tuple[SampleSegment, ...]:
    if document is None:
        return ()
    return tuple(SampleSegment(text=segment.text, is_trained=segment.is_trained) for segment in document.segments)


def make_notes(splits: Mapping[str, SplitAudit]) -> tuple[str, ...]:
    """What a person should look at before paying for a run."""
    notes = []
    for name, split in splits.items():
        if not split.num_documents:
            notes.append(f"{name}: no documents, too few rows to hold any out")
        if split.num_documents and split.num_ends_trained < split.num_documents:
            missing = split.num_documents - split.num_ends_trained
            notes.append(
                f"{name}: {missing:,} documents never train the end token (cut off, or without an answer's end)"
            )
        if split.num_cut:
            notes.append(f"{name}: {split.num_cut:,} documents are longer than a sequence and were cut")
        if split.num_duplicates:
            notes.append(f"{name}: {split.num_duplicates:,} documents are exact duplicates of others")
        if split.num_known:
            known = f"{split.num_known:,} of {split.num_documents:,} documents"
            useless = "; it cannot tell what was learnt" if 2 * split.num_known > split.num_documents else ""
            notes.append(f"{name}: {known} ask what training documents ask, too{useless}")
    return tuple(notes)
