"""Packs on disk contain every token once, in order, with its mask and row."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.corpus.bin_packing import pack_documents, pack_one_per_sequence
from launcher.corpus.pack_file import PackFile, write_packs
from launcher.corpus.token_spool import TokenSpool
from launcher.corpus.tokenize_rows import TokenBatch

CAPACITY = 32
END = 1

Token = tuple[int, int]  # id, trained
documents_of_tokens = st.lists(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 1)), min_size=1, max_size=CAPACITY), max_size=60
)


def batch_of(documents: list[list[Token]], first_row: int = 1) -> TokenBatch:
    flat = [token for document in documents for token in document]
    count = len(documents)
    return TokenBatch(
        np.array([token for token, _ in flat], dtype=np.int32),
        np.array([trained for _, trained in flat], dtype=np.uint8),
        np.array([len(document) for document in documents], dtype=np.int32),
        np.arange(first_row, first_row + count, dtype=np.int64),
        np.zeros(count, dtype=np.uint64),
        np.zeros(count, dtype=np.int64),
    )


def write(folder: Path, documents: list[list[Token]], *, is_packed: bool = True, batch: int = 7) -> PackFile:
    with TokenSpool(folder, "train", END) as spool:
        for start in range(0, len(documents), batch):
            spool.add(batch_of(documents[start : start + batch], first_row=start + 1))
        packing = pack_documents(spool.lengths, CAPACITY, seed=0) if is_packed else pack_one_per_sequence(spool.lengths)
        write_packs(folder / "train.arrow", spool, packing)
    return PackFile(folder / "train.arrow")


@given(documents_of_tokens, st.booleans())
def test_every_token_of_every_kept_document_appears_once_in_order(
    documents: list[list[Token]], is_packed: bool
) -> None:
    kept = {row: document for row, document in enumerate(documents, 1) if any(trained for _, trained in document)}
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder), documents, is_packed=is_packed)
        found: dict[int, list[Token]] = {}
        for pack in file:
            assert len(pack.input_ids) == len(pack.trained) == int(pack.document_lengths.sum()) <= CAPACITY
            assert len(pack.rows) == len(pack.document_lengths)
            start = 0
            for row, length in zip(pack.rows.tolist(), pack.document_lengths.tolist(), strict=True):
                assert row not in found, "a document in two places"
                ids, mask = pack.input_ids[start : start + length], pack.trained[start : start + length]
                found[row] = list(zip(ids.tolist(), mask.tolist(), strict=True))
                start += length
        assert found == kept
        assert file.column("num_trained").tolist() == [int(pack.trained.sum()) for pack in file]
        assert file.column("sum_squares").tolist() == [
            sum(length**2 for length in pack.document_lengths.tolist()) for pack in file
        ]


def test_many_record_batches(tmp_path: Path) -> None:
    """More packs than one record batch holds: indices cross the borders."""
    documents = [[(number, 1)] * CAPACITY for number in range(300)]
    file = write(tmp_path, documents, is_packed=False)
    assert len(file) == 300
    assert [int(file[index].input_ids[0]) for index in (0, 127, 128, 255, 256, 299)] == [0, 127, 128, 255, 256, 299]
    assert file.column("num_trained").tolist() == [CAPACITY] * 300


def test_reading_copies_nothing(tmp_path: Path) -> None:
    pack = write(tmp_path, [[(3, 1), (4, 0)]])[0]
    assert pack.input_ids.base is not None
    assert not pack.input_ids.flags.owndata
    assert not pack.input_ids.flags.writeable


def test_an_empty_split_is_a_file_without_packs(tmp_path: Path) -> None:
    file = write(tmp_path, [])
    assert len(file) == 0
    assert list(file) == []
    assert file.column("num_trained").tolist() == []


@pytest.mark.parametrize("index", [-1, 1, 99])
def test_there_is_no_pack_beyond_the_last(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError):
        write(tmp_path, [[(3, 1)]])[index]


def test_another_arrow_file_is_refused(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [1, 2]})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(pa.ArrowInvalid, match=r"x\.arrow: not a file of packs"):
        PackFile(tmp_path / "x.arrow")


def test_tokens_and_documents_are_counted_without_pyarrow_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, [[(5, 1)] * length for length in (3, 20, 1, 30, 9)])
    monkeypatch.setitem(sys.modules, "pyarrow.compute", None)  # importing it takes 0.1 s
    assert file.count("input_ids").tolist() == [len(pack.input_ids) for pack in file]
    assert file.count("document_lengths").tolist() == [len(pack.document_lengths) for pack in file]
