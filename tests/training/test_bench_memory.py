"""`launcher bench memory` with the process that really measures, on the tiny base: every code path but the GPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.bench.memory_cases import TINY, GridCase, select_cases
from launcher.bench.memory_grid import GridSpec
from launcher.bench.memory_plans import plan_case
from launcher.bench.memory_rows import load_rows, load_table
from launcher.plan.recipes import recipe_of
from launcher.training.bench.documents import write_random_store
from launcher.training.bench.memory import measure_case
from tests.conftest import ROOT, python_path

PATTERN = "2x64-none-eager"


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launcher", "bench", "memory", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("grid") / "rows.jsonl"
    result = bench("--out", str(file), "--bases", "tiny", "--only", PATTERN, "--minutes", "9")
    assert result.returncode == 0, result.stderr
    assert "5 of 6 cases are measured; 1 are left out" in result.stdout
    return file


@pytest.mark.slow
def test_every_case_is_trained_by_the_real_steps(rows: Path, tmp_path: Path) -> None:
    cases = {case.name: case for case in select_cases([TINY], PATTERN)}
    told = load_rows(rows)
    assert [row.case for row in told] == list(cases)
    for row in told:
        if row.left_out is not None:
            assert row.case.startswith("tiny-qlora")
            assert "needs a CUDA GPU" in row.left_out
            continue
        plan = plan_case(cases[row.case], tmp_path, GridSpec().num_steps).plan
        assert row.make_recipe() == recipe_of(plan)
        assert row.num_trainable == plan.adapter.trainable_parameters
        assert row.predicted_bytes == plan.memory.allocated_bytes
        assert sum(row.predicted_terms.values()) == row.predicted_total_bytes == plan.memory.total_bytes
        assert len(row.steps_seconds) == GridSpec().timed_steps
        assert row.tokens_per_second
        assert (row.peak_allocated_bytes, row.static_bytes, row.gpu) == (None, None, None)
        assert row.versions["torch"]


@pytest.mark.slow
def test_it_goes_on_where_it_stopped_and_sums_up(rows: Path, tmp_path: Path) -> None:
    *kept, last = rows.read_text().splitlines()
    again = tmp_path / "rows.jsonl"
    again.write_text("\n".join(kept[:-1]) + "\n" + kept[-1][:40])  # two are missing, and half a line is there
    result = bench("--out", str(again), "--bases", "tiny", "--only", PATTERN)
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert [row.case for row in load_rows(again)] == [row.case for row in load_rows(rows)]
    assert last
    result = bench("--collect", str(again), "--into", str(tmp_path / "table.json"), "--table")
    assert result.returncode == 0, result.stderr
    assert "no memory was measured" in result.stdout
    assert len(load_table(tmp_path / "table.json").records) == 5


def test_any_error_ends_the_process_but_not_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GridCase(base=TINY, kind="lora", micro_batch_size=1, sequence_length=64)

    def answer(error: Exception) -> tuple[str | None, bool]:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("launcher.training.bench.memory.assemble", fail)
        told = measure_case(case, GridSpec())
        return told.row.error, told.goes_on

    assert answer(torch.OutOfMemoryError("CUDA out of memory\nand so on")) == (
        "out of memory: CUDA out of memory",
        True,
    )
    assert answer(RuntimeError("CUDA error: an illegal memory access")) == (
        "RuntimeError: CUDA error: an illegal memory access",
        False,
    )


def test_random_documents_fill_their_packs(tmp_path: Path) -> None:
    store = write_random_store(tmp_path, num_packs=12, sequence_length=512, vocab_size=100, mean_tokens=350)
    train = store.open_split("train")
    assert len(train) >= 12
    lengths = [len(pack.input_ids) for pack in train]
    assert max(lengths) <= 512
    assert sum(lengths) / (512 * len(train)) > 0.85
