"""What the launcher does when an attempt ends badly: one rung lower where memory ran out, again where a rank died."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import metrics
from launcher.attempts import StartOptions, run_to_end
from launcher.errors import ExitCode
from launcher.plan.load import load_plan
from launcher.plan.model import Rung
from launcher.record import Outcome
from launcher.relay import Console
from tests.conftest import ROOT
from tests.distributed.bench import Bench, Cell, Trained, write_bench

FAILING = str(ROOT / "tests/faults/failing_train.py")
CONFIG = {"max_steps": 4, "eval_steps": 4, "save_steps": 2, "load_best_model_at_end": False, "save_total_limit": 9}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return write_bench(tmp_path_factory.mktemp("restarts"))


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Trained:
    return bench.train_here(make_cell().alone)


def make_cell(**changes: Any) -> Cell:
    return Cell(strategy="ddp", config=CONFIG, changes=changes, global_batch=4, micro_batch=2)


def start(
    bench: Bench, cell: Cell, monkeypatch: pytest.MonkeyPatch, *, ladder: tuple[Rung, ...] = (), **options: Any
) -> tuple[Outcome, Trained, str]:
    planned = bench.plan(cell)
    planned = replace(planned, plan=planned.plan.model_copy(update={"ladder": ladder}))
    from launcher.launch import write_run

    paths = write_run(planned, bench.runs, None)
    for name, value in bench.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("CUDA_VISIBLE_DEVICES",):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    said = io.BytesIO()
    console = Console(stdout=said, stderr=said)
    outcome = run_to_end(planned, paths, console, StartOptions(script=FAILING, **options))
    return outcome, Trained(paths), said.getvalue().decode()


def rung(micro_batch_size: int) -> Rung:
    return Rung(
        action=f"micro-batch {micro_batch_size}",
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=2 // micro_batch_size,
        checkpointing="none",
        strategy="ddp",
        offload="none",
        predicted_bytes=1000,
    )


@pytest.mark.slow
def test_one_rank_of_two_runs_out_of_memory(bench: Bench, whole: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank, which keeps no record: the others only see that it is gone."""
    monkeypatch.setenv("LAUNCHER_TEST_FULL", "1:256")
    outcome, trained, said = start(bench, make_cell(), monkeypatch, ladder=(rung(1),))
    assert (outcome.status, outcome.exit_code) == ("done", 0), said[-3000:]
    assert outcome.rungs == ("micro-batch 1",)
    assert len(outcome.attempts) == 2
    assert outcome.attempts[1].from_step == 2, "from the last checkpoint, not from the beginning"
    assert trained.packs == whole.packs
    assert trained.values(metrics.TRAIN_LOSS) == pytest.approx(whole.values(metrics.TRAIN_LOSS), rel=1e-5)
    plan = load_plan(trained.paths.plan)
    assert (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps) == (1, 2)
    assert plan.batch.global_batch_size == 4
    assert "starting again one rung lower: micro-batch 1" in said


@pytest.mark.slow
def test_no_rung_is_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_TEST_FULL", "0:256")
    outcome, _, said = start(bench, make_cell(), monkeypatch)
    assert outcome.exit_code == ExitCode.DOES_NOT_FIT
    assert "the GPU's memory is full: CUDA out of memory." in said
    assert "nothing is left on the ladder" in said


def test_a_rank_that_dies_is_started_again(
    bench: Bench, whole: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAUNCHER_TEST_DEATH", f"1:4:{tmp_path / 'died'}")
    outcome, trained, said = start(bench, make_cell(), monkeypatch, max_restarts=1)
    assert (outcome.status, outcome.exit_code) == ("done", 0), said[-3000:]
    assert "starting again from the last checkpoint (1 of 1 restarts)" in said
    assert len(outcome.attempts) == 2
    assert trained.packs == whole.packs
    assert trained.values(metrics.TRAIN_LOSS) == pytest.approx(whole.values(metrics.TRAIN_LOSS), rel=1e-5)


@pytest.mark.slow
def test_without_leave_nothing_is_started_again(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAUNCHER_TEST_DEATH", f"1:4:{tmp_path / 'died'}")
    outcome, trained, _ = start(bench, make_cell(), monkeypatch)
    assert outcome.exit_code == ExitCode.RUN_FAILED
    assert "rank 1" in outcome.error, outcome.error
    assert not trained.paths.adapter.exists()
