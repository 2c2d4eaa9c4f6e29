"""Preparation: cache hits, waiting, damage, full and read-only disks."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from launcher.core.errors import InputError
from launcher.corpus.prepare import Prepared, prepare
from launcher.corpus.store import lock_store, make_key
from launcher.corpus.tokenizer import BaseTokenizer
from tests.unit.corpus.inputs import (
    command,
    environment,
    launcher,
    make_rows,
    make_spec,
    prepare_quietly,
    read_files,
    write_expert,
    write_jsonl,
)


class UnusableTokenizer(BaseTokenizer):
    """Has the fingerprint of the real one, and cannot tokenise."""

    @property
    def backend(self) -> Tokenizer:
        raise AssertionError("a hit must not tokenise")


def test_second_call_uses_the_cache_without_tokenizing(expert: Path, base: Path) -> None:
    spec = make_spec(expert, base)
    first = prepare_quietly(spec)
    assert not first.was_cached
    before = read_files(first.store.folder)
    messages: list[str] = []
    again = replace(spec, tokenizer=UnusableTokenizer(folder=base))
    second = prepare(again, messages.append, lambda _: None)
    assert (second.was_cached, second.store, messages) == (True, first.store, [])
    assert read_files(first.store.folder) == before


def test_the_same_data_makes_the_same_bytes(expert: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def packs(prepared: Prepared) -> dict[str, bytes]:
        return {name: data for name, data in read_files(prepared.store.folder).items() if name.endswith(".arrow")}

    one = prepare_quietly(make_spec(expert, base))
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(expert.parent / "elsewhere"))
    other = prepare_quietly(make_spec(expert, base))
    assert not other.was_cached
    assert packs(one) == packs(other)


def test_rows_are_reported_as_they_are_done(expert: Path, base: Path) -> None:
    messages: list[str] = []
    steps: list[int] = []
    prepare(make_spec(expert, base), messages.append, steps.append)
    assert messages == ["preparing neo4j: no data prepared yet"]
    assert sum(steps) == 40


@pytest.mark.parametrize(
    ("name", "content", "damage"),
    [
        ("train.arrow", "flip", "train.arrow does not match its hash"),
        ("train.arrow", "truncate", "train.arrow has 100 bytes"),
        ("audit.json", "delete", "audit.json is missing"),
        ("store.json", "truncate", "store.json is missing or broken"),
    ],
)
def test_damaged_store_is_reported_and_rebuilt(expert: Path, base: Path, name: str, content: str, damage: str) -> None:
    spec = make_spec(expert, base)
    folder = prepare_quietly(spec).store.folder
    whole = (folder / "train.arrow").read_bytes()
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes({"flip": bytes(data), "truncate": bytes(data[:100]), "delete": b""}[content])
    if content == "delete":
        (folder / name).unlink()
    messages: list[str] = []
    again = prepare(spec, messages.append, lambda _: None)
    assert not again.was_cached
    [message] = messages
    assert message.startswith(f"preparing neo4j: {folder.name} is damaged ({damage}")
    assert message.endswith(" and is rebuilt")
    assert (folder / "train.arrow").read_bytes() == whole
    assert prepare_quietly(spec).was_cached


def test_a_failed_preparation_leaves_nothing(expert: Path, base: Path) -> None:
    write_jsonl(expert.parent / "train.jsonl", [{"question": "x", "schema": "y", "cypher": ""}] * 5)
    spec = make_spec(expert, base)
    with pytest.raises(InputError, match="no row of the train split can be trained on"):
        prepare_quietly(spec)
    assert [path.name for path in spec.root.iterdir() if not path.name.endswith((".lock", ".json"))] == []


def test_data_that_changes_meanwhile_is_not_kept(expert: Path, base: Path) -> None:
    spec = make_spec(expert, base)

    def append(_: int) -> None:
        with (expert.parent / "train.jsonl").open("a") as file:
            file.write(json.dumps(make_rows(1, first=99)[0]) + "\n")

    with pytest.raises(InputError, match="the data changed during preparation; nothing was stored"):
        prepare(spec, lambda _: None, append)
    assert not list(spec.root.glob("[!.]*"))


def start(expert: Path, base: Path) -> subprocess.Popen[str]:
    arguments = ("prepare", str(expert), "--gpu", "rtx4090", "--base", str(base), "--json")
    return subprocess.Popen(
        command(*arguments),
        cwd=expert.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
def test_two_processes_at_once_do_the_work_once(expert: Path, base: Path) -> None:
    write_jsonl(expert.parent / "train.jsonl", make_rows(1500))
    processes = [start(expert, base) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    results = [json.loads(stdout) for stdout, _ in outputs]
    assert sorted(result["hit"] for result in results) == [False, True]
    assert results[0]["store"] == results[1]["store"]
    assert sum("preparing neo4j: " in stderr for _, stderr in outputs) == 1
    assert len(list((expert.parent / "datasets_optimized/neo4j").glob("[!.]*"))) == 1


@pytest.mark.process
def test_second_process_waits_and_reports_it(expert: Path, base: Path) -> None:
    spec = make_spec(expert, base)
    with lock_store(spec.root, make_key(spec.key_parts())):
        process = start(expert, base)
        assert process.stderr is not None
        assert process.stderr.readline() == "another process is preparing this data: waiting for it\n"
        time.sleep(0.1)
        assert process.poll() is None
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["hit"] is False


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of its own: a tmpfs with the options that the test asks for."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a traceback may still hold a file open


@pytest.mark.process
@pytest.mark.parametrize("small_disk", ["size=256k", "size=1200k"], indirect=True)
def test_full_disk_is_an_error_and_leaves_no_files(
    expert: Path, base: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller disk is full while tokens are written, the larger one while packs are."""
    write_jsonl(expert.parent / "train.jsonl", make_rows(2000))
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(small_disk))
    spec = make_spec(expert, base)
    with pytest.raises(
        InputError, match=r"no space left while preparing data in .*; incomplete files were removed"
    ) as caught:
        prepare_quietly(spec)
    assert "LAUNCHER_DATA_DIR" in caught.value.hint
    left = [path.name for path in spec.root.iterdir()]
    assert all(name.endswith((".lock", ".json")) for name in left), left
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(expert.parent))
    write_jsonl(expert.parent / "train.jsonl", make_rows(40))
    assert not prepare_quietly(make_spec(expert, base)).was_cached


@pytest.mark.process
@pytest.mark.parametrize("small_disk", ["size=256k"], indirect=True)
def test_a_full_disk_is_one_message_on_the_command_line(expert: Path, base: Path, small_disk: Path) -> None:
    write_jsonl(expert.parent / "train.jsonl", make_rows(2000))
    arguments = ("prepare", str(expert), "--gpu", "rtx4090", "--base", str(base))
    result = launcher(*arguments, cwd=expert.parent, LAUNCHER_DATA_DIR=str(small_disk))
    assert result.returncode == 2
    first, error, hint = result.stderr.splitlines()
    assert first == "preparing neo4j: no data prepared yet"
    assert error.startswith("error: no space left while preparing data in ")
    assert hint.startswith("hint: free some space")


@pytest.mark.process
@pytest.mark.parametrize("small_disk", ["size=4m"], indirect=True)
def test_store_on_read_only_disk_is_used(
    expert: Path, base: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing store is used, even if its data was never hashed; a missing one is an error without traceback."""
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(small_disk))
    made = prepare_quietly(make_spec(expert, base)).store
    (made.folder.parent / ".fingerprints.json").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert prepare_quietly(make_spec(expert, base)).store == made
    with pytest.raises(InputError, match=r"preparing data in .* failed: Read-only file system"):
        prepare_quietly(make_spec(expert, base, ["training.config.packing=false"]))


def test_a_file_where_the_folder_should_be(expert: Path, base: Path) -> None:
    (expert.parent / "datasets_optimized").write_text("a file")
    with pytest.raises(
        InputError, match=r"preparing data in datasets_optimized/neo4j failed: Not a directory"
    ) as caught:
        prepare_quietly(make_spec(expert, base))
    assert caught.value.hint.endswith("choose another folder with LAUNCHER_DATA_DIR=DIR")


@pytest.mark.usefixtures("expert")
def test_sources_of_many_splits_and_kinds_in_one_store(tmp_path: Path, base: Path) -> None:
    write_jsonl(tmp_path / "valid.jsonl", make_rows(6, first=100))
    write_jsonl(tmp_path / "test.jsonl", make_rows(4, first=200))
    manifest = write_expert(tmp_path, {"validation_path": "valid.jsonl", "test_path": "test.jsonl"})
    store = prepare_quietly(make_spec(manifest, base)).store
    assert store.splits == ("test", "train", "validation")
    assert {name: split.num_documents for name, split in store.audit.splits.items()} == {
        "train": 40,
        "validation": 6,
        "test": 4,
    }
