"""Hashes of data files are cached while the file is unchanged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.core.errors import InputError
from launcher.corpus.sources import FileSource
from launcher.corpus.spec import fingerprint_source

MEMORY = ".fingerprints.json"


def source_of(file: Path) -> FileSource:
    return FileSource(path=file, format="jsonl")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.jsonl"
    path.write_text("one")
    return path


def test_it_is_the_sha256_of_the_bytes(tmp_path: Path, file: Path) -> None:
    expected = "sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    assert fingerprint_source(source_of(file), tmp_path / "root") == expected


def test_the_content_counts_not_the_name(tmp_path: Path, file: Path) -> None:
    copy = tmp_path / "y.jsonl"
    copy.write_text("one")
    assert fingerprint_source(source_of(file), tmp_path) == fingerprint_source(source_of(copy), tmp_path)


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, file: Path) -> None:
    fingerprint_source(source_of(file), tmp_path)
    memory = json.loads((tmp_path / MEMORY).read_text())
    assert len(memory) == 1
    (tmp_path / MEMORY).write_text(json.dumps(dict.fromkeys(memory, "remembered")))
    assert fingerprint_source(source_of(file), tmp_path) == "sha256:remembered"


def test_a_change_that_hides_its_time_is_seen(tmp_path: Path, file: Path) -> None:
    before = fingerprint_source(source_of(file), tmp_path)
    stat = file.stat()
    with file.open("r+") as content:
        content.write("two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert fingerprint_source(source_of(file), tmp_path) != before


@pytest.mark.parametrize("memory", ["", "{", "[]", '{"a": 1}', '"x"', "\xff"])
def test_corrupt_hash_cache_is_ignored(tmp_path: Path, file: Path, memory: str) -> None:
    expected = fingerprint_source(source_of(file), tmp_path / "other")
    (tmp_path / MEMORY).write_bytes(memory.encode("latin-1"))
    assert fingerprint_source(source_of(file), tmp_path) == expected


def test_what_a_killed_process_left_is_removed(tmp_path: Path, file: Path) -> None:
    left = tmp_path / f".{MEMORY}.12345.tmp"
    left.write_text("half")
    fingerprint_source(source_of(file), tmp_path)
    assert not left.exists()


def test_unwritable_hash_cache_is_not_an_error(tmp_path: Path, file: Path) -> None:
    (tmp_path / "root").write_text("a file where the folder should be")
    assert fingerprint_source(source_of(file), tmp_path / "root").startswith("sha256:7692")


def test_unreadable_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.jsonl: cannot be read: No such file"):
        fingerprint_source(source_of(tmp_path / "gone.jsonl"), tmp_path)
