"""The audit counts rows, documents and tokens, and notes what to check."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launcher.corpus.audit import SplitAudit, make_notes, make_sample, make_split_audit
from launcher.corpus.bin_packing import pack_documents
from launcher.corpus.documents import Document
from launcher.corpus.rows import BadRow, Rejections
from launcher.corpus.templates import CHATML, Segment
from launcher.corpus.token_spool import TokenSpool
from tests.unit.corpus.test_token_spool import END, batch_of


def audit_of(folder: Path) -> SplitAudit:
    rejections = Rejections()
    rejections.add(BadRow(number=7, reason="not UTF-8"))
    with TokenSpool(folder, "train", END) as spool:
        spool.add(batch_of(([1, 2, END], [0, 1, 1]), ([1] * 10, [1] * 10), ([1, 2, END], [0, 1, 1]), excess=(0, 4, 0)))
        spool.add(batch_of(([1], [0])))
        return make_split_audit(5, rejections, spool, pack_documents(spool.lengths, 10, 0), 10)


def test_audit_counts_rows_documents_and_tokens(tmp_path: Path) -> None:
    audit = audit_of(tmp_path)
    assert (audit.num_rows, audit.num_documents, audit.num_untrained) == (5, 3, 1)
    assert audit.rejected == {"not UTF-8": 1}
    assert audit.rejected_places == {"not UTF-8": (7,)}
    assert (audit.num_tokens, audit.num_trained) == (16, 14)
    assert (audit.num_cut, audit.num_cut_tokens) == (1, 4)
    assert (audit.num_duplicates, audit.num_ends_trained) == (1, 2)
    assert (audit.mean_length, audit.max_length) == (16 / 3, 10)
    assert (audit.num_packs, audit.packing_efficiency) == (2, 0.8)
    assert audit.trained_share == 14 / 16


def test_the_histogram_holds_every_document(tmp_path: Path) -> None:
    histogram = audit_of(tmp_path).histogram
    assert sum(count for _, count in histogram) == 3
    assert histogram[-1] == (10, 1), "the longest is inside the last bin"
    assert [edge for edge, _ in histogram] == sorted({edge for edge, _ in histogram})


def test_empty_split_has_a_note(tmp_path: Path) -> None:
    with TokenSpool(tmp_path, "validation", END) as spool:
        audit = make_split_audit(0, Rejections(), spool, pack_documents(np.zeros(0, dtype=np.int32), 10, 0), 10)
    assert (audit.mean_length, audit.max_length, audit.trained_share) == (0.0, 0, 0.0)
    (note,) = make_notes({"validation": audit})
    assert note == "validation: no documents, because there are too few rows to hold any out"


def test_notes(tmp_path: Path) -> None:
    assert make_notes({"train": audit_of(tmp_path)}) == (
        "train: 1 documents never train the end token (truncated, or without the end of an answer)",
        "train: 1 documents are longer than max_seq_length and were truncated",
        "train: 1 document is an exact duplicate",
    )


def test_the_sample_shows_the_mask() -> None:
    document = Document(1, (Segment("question ", False), Segment("answer", True)), 0)
    assert [(part.text, part.is_trained) for part in make_sample(document, CHATML)] == [
        ("question ", False),
        ("answer", True),
    ]
    assert make_sample(None, CHATML) == ()
