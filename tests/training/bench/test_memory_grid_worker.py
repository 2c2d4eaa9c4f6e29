"""The memory grid with its real worker on the tiny base model: every code path except the GPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.memory_grid.cases import TINY, GridCase, select_cases
from benchmarks.memory_grid.grid import GridSpec
from benchmarks.memory_grid.plans import plan_case
from benchmarks.memory_grid.rows import load_rows, load_table
from benchmarks.memory_grid.worker import measure_case
from launcher.bench.workers.documents import write_random_store
from launcher.plan.estimator_inputs import recipe_from_plan
from tests.conftest import ROOT, python_path

PATTERN = "2x64-none-eager"


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.memory_grid", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("grid") / "rows.jsonl"
    result = bench("--out", str(file), "--bases", "tiny", "--only", PATTERN, "--minutes", "9")
    assert result.returncode == 0, result.stderr
    assert "5 of 7 cases measured; 2 skipped" in result.stdout
    return file


@pytest.mark.slow
def test_rows_have_the_recipe_and_estimate_of_the_plan(rows: Path, tmp_path: Path) -> None:
    cases = {case.name: case for case in select_cases([TINY], PATTERN)}
    measured = load_rows(rows)
    assert [row.case for row in measured] == list(cases)
    for row in measured:
        if row.left_out is not None:
            assert row.case.startswith("tiny-qlora") or row.case.endswith("bf16_weights")
            assert "needs a" in row.left_out
            assert "GPU" in row.left_out
            continue
        plan = plan_case(cases[row.case], tmp_path, GridSpec().num_steps).plan
        assert row.make_recipe() == recipe_from_plan(plan)
        assert row.num_trainable == plan.adapter.trainable_parameters
        assert row.predicted_bytes == plan.memory.allocated_bytes
        assert sum(row.predicted_terms.values()) == row.predicted_total_bytes == plan.memory.total_bytes
        assert len(row.steps_seconds) == GridSpec().timed_steps
        assert row.tokens_per_second
        assert (row.peak_allocated_bytes, row.static_bytes, row.gpu) == (None, None, None)
        assert row.versions["torch"]


@pytest.mark.slow
def test_grid_resumes_and_is_summarized(rows: Path, tmp_path: Path) -> None:
    *kept, last = rows.read_text().splitlines()
    again = tmp_path / "rows.jsonl"
    again.write_text("\n".join(kept[:-1]) + "\n" + kept[-1][:40])  # two rows are missing, and one line is incomplete
    result = bench("--out", str(again), "--bases", "tiny", "--only", PATTERN)
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert [row.case for row in load_rows(again)] == [row.case for row in load_rows(rows)]
    assert last
    result = bench("--collect", str(again), "--output", str(tmp_path / "table.json"), "--table")
    assert result.returncode == 0, result.stderr
    assert "no memory was measured" in result.stdout
    assert len(load_table(tmp_path / "table.json").records) == 5


def test_errors_except_out_of_memory_end_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GridCase(base=TINY, kind="lora", micro_batch_size=1, sequence_length=64)

    def measure(error: Exception) -> tuple[str | None, bool]:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("benchmarks.memory_grid.worker.build_run", fail)
        reply = measure_case(case, GridSpec())
        return reply.row.error, reply.can_continue

    assert measure(torch.OutOfMemoryError("CUDA out of memory\nand so on")) == (
        "out of memory: CUDA out of memory",
        True,
    )
    assert measure(RuntimeError("CUDA error: an illegal memory access")) == (
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
