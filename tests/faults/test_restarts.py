"""The launcher restarts a failed attempt: with a fallback after out of memory, unchanged after a lost rank."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.core import metrics
from launcher.core.errors import ExitCode
from launcher.launch.restart import StartOptions
from launcher.launch.write_run import write_run
from launcher.plan.model import OomFallback, load_plan
from launcher.render import Command
from launcher.runs.record import Outcome
from tests.conftest import ROOT
from tests.distributed.harness import Harness, TrainedRun, TrainingCase
from tests.faults.fork_server import ForkServer
from tests.faults.restarting_launcher import SCRIPT as RESTARTING_LAUNCHER
from tests.faults.restarting_launcher import StartedRun

FAILING_TRAIN_SCRIPT = str(ROOT / "tests/faults/failing_train.py")
CONFIG = {"max_steps": 4, "eval_steps": 4, "save_steps": 2, "load_best_model_at_end": False, "save_total_limit": 9}


@pytest.fixture(scope="module")
def uninterrupted(harness: Harness) -> TrainedRun:
    return harness.train_in_process(make_case().single_process)


def make_case(**changes: Any) -> TrainingCase:
    return TrainingCase(strategy="ddp", config=CONFIG, changes=changes, global_batch=4, micro_batch=2)


def start(
    harness: Harness,
    fork_server: ForkServer,
    case: TrainingCase,
    *,
    fallbacks: tuple[OomFallback, ...] = (),
    max_restarts: int = 0,
    **variables: str,
) -> tuple[Outcome, TrainedRun, str]:
    planned = harness.plan(case)
    planned = replace(planned, plan=planned.plan.model_copy(update={"oom_fallbacks": fallbacks}))
    paths = write_run(planned, harness.runs, None)
    options = StartOptions(script=FAILING_TRAIN_SCRIPT, max_restarts=max_restarts)
    pickled = harness.folder / f"{paths.run_id}.pickle"
    pickled.write_bytes(pickle.dumps(StartedRun(planned=planned, paths=paths, options=options)))
    argv = (sys.executable, RESTARTING_LAUNCHER, str(pickled))
    launched = fork_server.launch(Command(argv=argv, environment={}), **variables)
    trained = TrainedRun(paths)
    assert trained.outcome.exit_code == launched.returncode, launched.console
    return trained.outcome, trained, launched.console


def make_fallback(micro_batch_size: int) -> OomFallback:
    return OomFallback(
        action=f"micro-batch {micro_batch_size}",
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=2 // micro_batch_size,
        checkpointing="none",
        strategy="ddp",
        offload="none",
        predicted_bytes=1000,
    )


@pytest.mark.slow
def test_oom_on_one_rank_restarts_with_fallback(
    harness: Harness, fork_server: ForkServer, uninterrupted: TrainedRun
) -> None:
    """Rank 1 runs out of memory and writes no outcome: rank 0 only sees that it is gone."""
    outcome, trained, output = start(
        harness, fork_server, make_case(), fallbacks=(make_fallback(1),), LAUNCHER_TEST_FULL="1:256"
    )
    assert (outcome.status, outcome.exit_code) == ("done", 0), output[-3000:]
    assert outcome.oom_fallbacks == ("micro-batch 1",)
    assert len(outcome.attempts) == 2
    assert outcome.attempts[1].from_step == 2, "from the last checkpoint, not from step 0"
    assert trained.packs == uninterrupted.packs
    assert trained.values(metrics.TRAIN_LOSS) == pytest.approx(uninterrupted.values(metrics.TRAIN_LOSS), rel=1e-5)
    plan = load_plan(trained.paths.plan)
    assert (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps) == (1, 2)
    assert plan.batch.global_batch_size == 4
    assert "restarting with the next OOM fallback: micro-batch 1" in output


@pytest.mark.slow
def test_oom_without_fallback_does_not_fit(harness: Harness, fork_server: ForkServer) -> None:
    outcome, _, output = start(harness, fork_server, make_case(), LAUNCHER_TEST_FULL="0:256")
    assert outcome.exit_code == ExitCode.DOES_NOT_FIT
    assert "out of memory: CUDA out of memory." in output
    assert "no fallback is left" in output


def test_dead_rank_is_restarted(
    harness: Harness, fork_server: ForkServer, uninterrupted: TrainedRun, tmp_path: Path
) -> None:
    death = f"1:4:{tmp_path / 'died'}"
    outcome, trained, output = start(harness, fork_server, make_case(), max_restarts=1, LAUNCHER_TEST_DEATH=death)
    assert (outcome.status, outcome.exit_code) == ("done", 0), output[-3000:]
    assert "restarting from the last checkpoint (restart 1 of 1)" in output
    assert len(outcome.attempts) == 2
    assert trained.packs == uninterrupted.packs
    assert trained.values(metrics.TRAIN_LOSS) == pytest.approx(uninterrupted.values(metrics.TRAIN_LOSS), rel=1e-5)


@pytest.mark.slow
def test_no_restart_without_max_restarts(harness: Harness, fork_server: ForkServer, tmp_path: Path) -> None:
    death = f"1:4:{tmp_path / 'died'}"
    outcome, trained, _ = start(harness, fork_server, make_case(), LAUNCHER_TEST_DEATH=death)
    assert outcome.exit_code == ExitCode.RUN_FAILED
    assert "rank 1" in outcome.error, outcome.error
    assert not trained.paths.adapter.exists()
