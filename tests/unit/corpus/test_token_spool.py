"""The token spool counts and stores documents, and closes quietly after an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launcher.corpus.token_spool import TokenSpool
from launcher.corpus.tokenize_rows import TokenBatch

END = 9


def batch_of(*documents: tuple[list[int], list[int]], excess: tuple[int, ...] | None = None) -> TokenBatch:
    count = len(documents)
    return TokenBatch(
        np.array([token for ids, _ in documents for token in ids], dtype=np.int32),
        np.array([flag for _, mask in documents for flag in mask], dtype=np.uint8),
        np.array([len(ids) for ids, _ in documents], dtype=np.int32),
        np.arange(1, count + 1, dtype=np.int64),
        np.zeros(count, dtype=np.uint64),
        np.array(excess or (0,) * count, dtype=np.int64),
    )


def test_documents_without_anything_to_train_are_left_out(tmp_path: Path) -> None:
    with TokenSpool(tmp_path, "train", END) as spool:
        spool.add(batch_of(([1, 2], [0, 0]), ([3, 4, 5], [0, 1, 1]), ([6], [0])))
        ids, mask = spool.read()
        assert ids.tolist() == [3, 4, 5]
        assert mask.tolist() == [0, 1, 1]
        assert spool.rows.tolist() == [2]
        assert spool.lengths.tolist() == [3]
        assert spool.trained.tolist() == [2]
        assert spool.num_untrained == 2


def test_a_document_without_tokens_takes_nothing_from_its_neighbour(tmp_path: Path) -> None:
    with TokenSpool(tmp_path, "train", END) as spool:
        spool.add(batch_of(([], []), ([3], [1]), ([], [])))
        assert spool.rows.tolist() == [2]
        assert spool.num_untrained == 2


def test_ends_are_counted_where_they_are_trained(tmp_path: Path) -> None:
    with TokenSpool(tmp_path, "train", END) as spool:
        spool.add(batch_of(([1, END], [1, 1]), ([END, 2], [0, 1]), ([END, END], [1, 1])))
        assert spool.num_ends_trained == 2


def test_duplicates_are_equal_documents_across_batches(tmp_path: Path) -> None:
    with TokenSpool(tmp_path, "train", END) as spool:
        spool.add(batch_of(([1, 2], [0, 1]), ([1, 3], [0, 1])))
        spool.add(batch_of(([1, 2], [0, 1]), ([1], [1])))
        assert spool.num_duplicates == 1


def test_cut_documents_are_counted_with_their_tokens(tmp_path: Path) -> None:
    with TokenSpool(tmp_path, "train", END) as spool:
        spool.add(batch_of(([1], [1]), ([2], [1]), ([3], [1]), excess=(5, 0, 2)))
        assert (spool.num_cut, spool.num_cut_tokens) == (2, 7)


def test_an_empty_batch_changes_nothing(tmp_path: Path) -> None:
    with TokenSpool(tmp_path, "train", END) as spool:
        spool.add(batch_of())
        ids, mask = spool.read()
        assert len(ids) == len(mask) == len(spool.lengths) == spool.num_duplicates == 0


def test_its_files_are_removed(tmp_path: Path) -> None:
    with TokenSpool(tmp_path, "train", END) as spool:
        spool.add(batch_of(([1], [1])))
    spool.remove()
    assert list(tmp_path.iterdir()) == []
