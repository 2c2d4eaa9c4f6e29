"""`launcher bench` end to end: processes that train the tiny base model on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.bench.ablation import RECORDS_FILE
from launcher.bench.ablation_report import Ablation
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
def test_two_batch_sizes_train_the_same_sequences(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bench(data, "json", "--vary", "batch_size=1,2", "--repeats", "5", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = BenchResult.model_validate_json(done.stdout)
    assert [variant.label for variant in result.variants] == ["batch_size=1", "batch_size=2"]
    assert [(block.round, block.variant) for block in result.blocks[:6]] == [
        (1, 0),
        (1, 1),
        (2, 1),
        (2, 0),
        (3, 0),
        (3, 1),
    ]
    assert len(result.blocks) == 10
    tokens = {sum(block.timing.tokens) for block in result.blocks}
    assert len(tokens) == 1  # all blocks of both variants train the same sequences
    assert [variant.steps for variant in result.variants] == [4, 2]
    (verdict,) = result.verdicts
    assert verdict.low <= verdict.ratio <= verdict.high
    assert {"global batch", "batch split"} <= {change.name for change in result.changes}
    assert "batch_size=1: 1, batch_size=2: 2" in " ".join(result.notes)
    assert json.loads((out / "result.json").read_text()) == json.loads(done.stdout)
    assert verdict.text.split(":")[0].replace("_", "\\_") in (out / "report.md").read_text()


@pytest.mark.slow
def test_interrupted_ablation_resumes(data: Path, tmp_path: Path) -> None:
    words = ("ablation", "json", "--out", str(tmp_path), "--json")
    first_run = bench(data, *words, "--stages", "tf32")
    assert first_run.returncode == 0, first_run.stderr
    first = Ablation.model_validate_json(first_run.stdout).records
    statuses = [record.status for record in first]  # baseline, tf32, launcher, fp8, tf32 alone, baseline again
    assert statuses == ["measured", "unavailable", "measured", "unavailable", "unavailable", "measured"]
    with (tmp_path / RECORDS_FILE).open("a") as file:
        file.write('{"key": "pack')  # a line cut short by a kill
    done = bench(data, *words, "--stages", "tf32,packing")
    assert done.returncode == 0, done.stderr
    ablation = Ablation.model_validate_json(done.stdout)
    by_key = {(record.mode, record.key): record for record in ablation.records}
    assert by_key["cumulative", "tf32"].reason == "no GPU"
    assert all(record in ablation.records for record in first)  # nothing is measured twice
    assert (
        by_key["alone", "packing"].timing == by_key["cumulative", "packing"].timing
    )  # equal configurations are measured once
    assert by_key["alone", "baseline"].timing != by_key["cumulative", "baseline"].timing  # except the second baseline
    tokens = {record.timing.tokens for record in ablation.records if record.timing is not None}
    assert len(tokens) == 1  # every stage trains the same rows, the launcher's own loop, too
    assert (tmp_path / "ablation.md").read_bytes().startswith(b"# Ablation")


def test_unknown_key_is_refused_without_a_traceback(data: Path) -> None:
    done = bench(data, "json", "--vary", "torch_compil=true,false")
    assert done.returncode == 2
    error = "error: --vary torch_compil: not a key of training.config\n"
    assert done.stderr == f"{error}hint: did you mean torch_compile?\n"
