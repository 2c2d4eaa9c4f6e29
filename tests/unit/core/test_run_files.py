"""Files of a run directory are read within limits: regular, small enough, plausible."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from launcher.core.errors import InputError
from launcher.core.metrics import StepMetrics, append_metrics, cut_metrics, load_metrics
from launcher.core.run_files import load_model, open_log, parse_model, read_lines, read_text
from launcher.core.run_paths import write_text_atomically
from launcher.runs.checkpoints import CheckpointManifest, Damaged, hash_file, read_checkpoint
from launcher.runs.record import Outcome, load_outcome
from tests.fuzz.run_directory import make_runs, time_limit

OUTCOME = '{"run_id": "a", "status": "done", "started_at": "x", "pid": 1, %s}'


def place(file: Path, kind: str) -> Path:
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        with file.open("wb") as out:
            out.truncate(20 << 30)
    return file


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "sparse", "missing"])
def test_what_is_not_a_small_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    file = place(tmp_path / "file", kind)
    with time_limit(10):
        with pytest.raises(InputError, match="cannot be read"):
            read_text(file)
        with pytest.raises(InputError, match="cannot be read"):
            load_metrics(file)
        assert load_outcome(file) is None
        if kind not in ("sparse", "missing"):
            for use in (hash_file, open_log):
                with pytest.raises(OSError, match=r"not a regular file|directory|No such device|symbolic links"):
                    use(file)


@pytest.mark.parametrize(
    "field",
    ['"steps_done": 1' + "0" * 400, '"final_loss": 1e308', '"final_loss": NaN', '"goodput": {"a": "1e999"}'],
)
def test_implausible_numbers_are_refused(field: str) -> None:
    assert parse_model(Outcome, OUTCOME % '"steps_done": 3', Path("outcome.json")).steps_done == 3
    with pytest.raises(InputError, match="not a valid outcome"):
        parse_model(Outcome, OUTCOME % field, Path("outcome.json"))


@pytest.mark.parametrize(
    "line",
    [
        "[" * 200_000,
        '{"step": 1, "epoch": 0, "values": {"train/loss": 1e308}, "packs": []}',
        '{"step": 1000000000000000, "epoch": 0, "values": {}, "packs": []}',
        '{"step": Infinity, "epoch": 0, "values": {}, "packs": []}',
        '{"step": -1, "epoch": 0, "values": {}, "packs": []}',
        '{"step": 1, "epoch": 0, "values": {"eval/\\ud800": 1}, "packs": []}',
        '{"step": 1, "epoch": 0, "values": {}, "packs": [[]]}',
    ],
)
def test_a_line_of_metrics_that_no_run_wrote_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(InputError, match="line 1: not a line of metrics"):
        load_metrics(file)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"schedule_steps": 20', '"schedule_steps": 1000000000000000'),
        ('"schedule_steps": 20', '"schedule_steps": -1'),
        ('"num_steps": 20', '"num_steps": 1000000000000'),
        ('"num_ranks": 1', '"num_ranks": 0'),
        ('"step": 20', '"step": 1000000000000000'),
        ('"scaler": {}', '"scaler": {"scale": 1e999}'),
        ('"random.safetensors"', '"../random.safetensors"'),
        ('"random.safetensors"', '"a\\u0000b"'),
    ],
)
def test_a_checkpoint_with_absurd_counts_is_damaged(tmp_path: Path, old: str, new: str) -> None:
    make_runs(tmp_path)
    folder = tmp_path / "bad/checkpoints/step-000020"
    manifest = folder / "checkpoint.json"
    assert not isinstance(read_checkpoint(folder), Damaged)
    assert load_model(CheckpointManifest, manifest).step == 20
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new, 1))
    assert isinstance(read_checkpoint(folder), Damaged)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "random.safetensors"])
def test_a_checkpoint_whose_files_have_no_hash_is_damaged(tmp_path: Path, name: str) -> None:
    make_runs(tmp_path)
    folder = tmp_path / "bad/checkpoints/step-000020"
    tree = json.loads((folder / "checkpoint.json").read_text())
    del tree["files"][name]
    (folder / "checkpoint.json").write_text(json.dumps(tree))
    damaged = read_checkpoint(folder)
    assert isinstance(damaged, Damaged)
    assert damaged.reason == f"checkpoint.json does not list {name}"


def test_a_checkpoint_with_a_pipe_is_damaged(tmp_path: Path) -> None:
    """Also if it is not listed: a library would wait for it."""
    make_runs(tmp_path)
    folder = tmp_path / "bad/checkpoints/step-000020"
    os.mkfifo(folder / "weights.safetensors")
    damaged = read_checkpoint(folder)
    assert isinstance(damaged, Damaged)
    assert damaged.reason == "weights.safetensors: not a regular file"


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "console.log").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        open_log(tmp_path / "console.log")
    assert (tmp_path / "precious").read_text() == "mine"


def test_nothing_is_written_through_a_temporary_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f".a.json.{os.getpid()}.tmp").symlink_to("precious")
    write_text_atomically(tmp_path / "a.json", '"\ud800"')  # also if it is not valid Unicode
    assert (tmp_path / "a.json").read_text() == '"\\ud800"'
    assert (tmp_path / "precious").read_text() == "mine"


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    dead, other, living = tmp_path / ".a.json.4000000.tmp", tmp_path / ".b.json.4000000.tmp", tmp_path / ".a.json.1.tmp"
    for file in (dead, other, living):
        file.touch()
    write_text_atomically(tmp_path / "a.json", "{}")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([other.name, living.name, "a.json"])


def write_steps(path: Path, count: int) -> None:
    for step in range(1, count + 1):
        append_metrics(path, StepMetrics(step=step, epoch=0.0, values={"train/loss": 1.0}, packs=(step,)))


def test_a_run_resumes_with_metrics_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 4)
    with pytest.raises(InputError, match="larger than 0 MiB"):
        load_metrics(path, 100)
    with patch("launcher.core.metrics.read_lines", side_effect=read_lines) as read:
        assert [row.step for row in cut_metrics(path, 2).kept] == [1, 2]
    assert read.call_args.args == (path, None)
    assert [row.step for row in load_metrics(path, 1000)] == [1, 2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": "\xff"}\n', "not UTF-8"),
        (b"\0" * (5 << 20), "a line has more than 4 MiB"),
        (b"{}\n", "line 1: not a line"),
    ],
)
def test_damaged_metrics_are_an_error(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as raised:
        load_metrics(path)
    assert raised.value.hint


def test_an_incomplete_last_line_of_metrics_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 2)
    path.write_bytes(path.read_bytes() + b'{"step": 3, "ep\xc3')
    assert [row.step for row in load_metrics(path)] == [1, 2]
