"""`launcher bench` as a user starts it: real processes that train the tiny base on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.bench.ladder import RECORD_FILE
from launcher.bench.ladder_report import Ladder
from launcher.bench.result import BenchResult
from tests.conftest import ROOT, python_path

SMALL = ("training.config.max_seq_length=128", "training.config.batch_size=1")
SETS = [word for override in SMALL for word in ("--set", override)]
SETS += ["--set", "training.config.gradient_accumulation_steps=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def bench(data: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "LAUNCHER_DATA_DIR": str(data),
    }
    command = [sys.executable, "-m", "launcher", "bench", *words, *SETS, "--steps", "2", "--warm", "1"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_two_batch_sizes_are_compared_on_the_same_sequences(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bench(data, "json", "--vary", "batch_size=1,2", "--repeats", "5", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = BenchResult.model_validate_json(done.stdout)
    assert [side.label for side in result.sides] == ["batch_size=1", "batch_size=2"]
    assert [(block.round, block.side) for block in result.blocks[:6]] == [
        (1, 0),
        (1, 1),
        (2, 1),
        (2, 0),
        (3, 0),
        (3, 1),
    ]
    assert len(result.blocks) == 10
    tokens = {sum(block.timing.tokens) for block in result.blocks}
    assert len(tokens) == 1  # all blocks of both sides train the same sequences
    assert [side.steps for side in result.sides] == [4, 2]
    (verdict,) = result.verdicts
    assert verdict.low <= verdict.ratio <= verdict.high
    assert {"global batch", "split"} <= {change.name for change in result.changes}
    assert "batch_size=1: 1, batch_size=2: 2" in " ".join(result.notes)
    assert json.loads((out / "result.json").read_text()) == json.loads(done.stdout)
    assert verdict.words.split(":")[0].replace("_", "\\_") in (out / "report.md").read_text()


@pytest.mark.slow
def test_a_ladder_that_was_interrupted_goes_on(data: Path, tmp_path: Path) -> None:
    words = ("ladder", "json", "--out", str(tmp_path), "--json")
    begun = bench(data, *words, "--rungs", "tf32")
    assert begun.returncode == 0, begun.stderr
    first = Ladder.model_validate_json(begun.stdout).records
    assert [record.status for record in first] == ["measured", "not here", "measured", "not here", "measured"]
    with (tmp_path / RECORD_FILE).open("a") as file:
        file.write('{"key": "pack')  # killed while it wrote a line
    done = bench(data, *words, "--rungs", "tf32,packing")
    assert done.returncode == 0, done.stderr
    ladder = Ladder.model_validate_json(done.stdout)
    found = {(record.stack, record.key): record for record in ladder.records}
    assert found["cumulative", "tf32"].reason == "no GPU"
    assert all(record in ladder.records for record in first)  # nothing is measured twice
    assert found["alone", "packing"].timing == found["cumulative", "packing"].timing  # the same loop is measured once
    assert found["alone", "before"].timing != found["cumulative", "before"].timing  # and this one again
    tokens = {record.timing.tokens for record in ladder.records if record.timing is not None}
    assert len(tokens) == 1  # every rung trains the same rows, the launcher's own loop too
    for name, begin in {"ladder.md": b"# The ladder", "ladder.png": b"\x89PNG", "ladder.html": b"<!doctype"}.items():
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_a_wrong_key_is_told_without_a_traceback(data: Path) -> None:
    done = bench(data, "json", "--vary", "torch_compil=true,false")
    assert done.returncode == 2
    assert done.stderr == ("error: --vary torch_compil: no key of training.config\nhint: did you mean torch_compile?\n")
