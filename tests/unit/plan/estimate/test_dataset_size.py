"""Estimated number of rows before tokenization."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.manifest.dataset import Dataset, Preprocessing, Splits
from launcher.plan.estimate.dataset_size import ASSUMED_MEAN_TOKENS, probe_rows, probe_sample, with_tokens_per_row


def write_rows(file: Path, count: int, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": "x" * (size - 13)}) + "\n" for _ in range(count)))


def test_rows_of_a_local_file_are_counted(tmp_path: Path) -> None:
    write_rows(tmp_path / "data/train.jsonl", 25, 360)
    rows = probe_rows(Dataset(path="data/train.jsonl"), tmp_path)
    assert rows.num_rows == 25
    assert rows.mean_tokens == 100
    assert rows.is_measured
    assert rows.basis == "read from train.jsonl: 25 rows of 360 bytes"


def test_csv_header_is_not_a_row(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("question,answer\n" + "a,b\n" * 25)
    assert probe_rows(Dataset(path="train.csv"), tmp_path).num_rows == 25
    (tmp_path / "train.csv").write_text("question,answer" + "x" * 1000 + "\n" + "a,b\n" * 50_000)
    assert probe_rows(Dataset(path="train.csv"), tmp_path).num_rows == 50_000


def test_large_file_is_sampled(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 50_000, 100)
    rows = probe_rows(Dataset(path="train.jsonl"), tmp_path)
    assert rows.num_rows == 50_000
    assert "about 50,000 rows" in rows.basis


def test_empty_lines_do_not_distort_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"a": 1}\n\n' + '{"a": 1}\n' * 50_000)
    assert probe_rows(Dataset(path="train.jsonl"), tmp_path).num_rows == pytest.approx(50_001, rel=1e-3)
    file.write_text('{"a": 1}\n' * 2_000)
    rows = probe_rows(Dataset(path="train.jsonl"), tmp_path)
    assert rows.num_rows == 2_000
    assert "about" not in rows.basis, "all of it was read"


def test_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n\n")
    assert probe_rows(Dataset(path="train.jsonl"), tmp_path).num_rows == 0


def test_manifest_row_count_is_used_without_a_file(tmp_path: Path) -> None:
    stated = Dataset(path="neo4j/text2cypher", splits=Splits(train=1000))
    rows = probe_rows(stated, tmp_path)
    assert (rows.num_rows, rows.mean_tokens) == (1000, ASSUMED_MEAN_TOKENS)
    assert not rows.is_measured
    processed = Dataset(path="x/y", splits=Splits(train=0), preprocessing=Preprocessing(processed_examples=7))
    assert probe_rows(processed, tmp_path).num_rows == 7


def test_unknown_size_is_reported(tmp_path: Path) -> None:
    rows = probe_rows(Dataset(path="x/y"), tmp_path)
    assert rows.num_rows is None
    assert "unknown" in rows.basis


def test_sample_is_found_next_to_the_manifest(tmp_path: Path) -> None:
    assert probe_sample(tmp_path).num_rows is None
    write_rows(tmp_path / "sample/train.jsonl", 3, 100)
    assert probe_sample(tmp_path).num_rows == 3


def test_unreadable_path_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        probe_rows(Dataset(path="x" * 300 + ".jsonl"), tmp_path)
    write_rows(tmp_path / "train.jsonl", 3, 100)

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(InputError, match=r"train\.jsonl cannot be read: Permission denied"):
        probe_rows(Dataset(path="train.jsonl"), tmp_path)


def test_tokens_per_row_can_be_configured(tmp_path: Path) -> None:
    given = "; 1,200 tokens per row, as given by --tokens-per-row"
    stated = with_tokens_per_row(probe_rows(Dataset(path="x/y", splits=Splits(train=1000)), tmp_path), 1200)
    assert (stated.num_rows, stated.mean_tokens) == (1000, 1200)
    assert stated.basis == "the manifest states 1,000 rows" + given
    assert probe_rows(Dataset(path="x/y", splits=Splits(train=1000)), tmp_path).is_length_assumed
    assert not stated.is_length_assumed
    write_rows(tmp_path / "train.jsonl", 3, 100)
    read = with_tokens_per_row(probe_rows(Dataset(path="train.jsonl"), tmp_path), 1200)
    assert read.basis == "read from train.jsonl: 3 rows" + given
    assert read.is_measured
    unknown = with_tokens_per_row(probe_rows(Dataset(path="x/y"), tmp_path), 1200)
    assert unknown.basis == "the number of rows is unknown before the data is read" + given
