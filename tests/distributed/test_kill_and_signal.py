"""After a kill or a signal no process is left or hangs, and all ranks stop after the same step."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launcher.core.errors import ExitCode
from launcher.core.metrics import load_metrics
from tests.distributed.harness import Harness, TrainedRun, TrainingCase, make_command
from tests.distributed.placement_recording_train import END_SECONDS_VARIABLE, STEP_SECONDS_VARIABLE
from tests.faults.fork_server import ForkServer, LaunchedProcesses

LONG = {"max_steps": 2000, "evaluation_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


@contextmanager
def training(
    harness: Harness, fork_server: ForkServer, case: TrainingCase, **more: str
) -> Iterator[tuple[LaunchedProcesses, TrainedRun]]:
    """Start a run of two ranks and wait until it trains."""
    planned, paths = harness.write(case)
    trained = TrainedRun(paths)
    with fork_server.started(make_command(planned, paths), **{STEP_SECONDS_VARIABLE: "0.3", **more}) as launched:
        launched.wait_until(lambda: paths.metrics.exists() and len(load_metrics(paths.metrics)) >= 2)
        yield launched, trained


def get_pid(trained: TrainedRun, rank: int) -> int:
    return trained.placement(rank)["pid"]


@pytest.mark.slow
def test_workers_exit_after_agent_is_killed(harness: Harness, fork_server: ForkServer) -> None:
    with training(harness, fork_server, TrainingCase(strategy="ddp", config=LONG)) as (launched, trained):
        assert {get_pid(trained, 0), get_pid(trained, 1)} <= set(launched.processes)
        os.kill(launched.agent, signal.SIGKILL)
        launched.wait_until(lambda: launched.poll() is not None and not launched.processes, seconds=10)


def test_all_processes_exit_after_worker_is_killed(harness: Harness, fork_server: ForkServer) -> None:
    with training(harness, fork_server, TrainingCase(strategy="ddp", config=LONG)) as (launched, trained):
        assert {launched.agent, get_pid(trained, 0), get_pid(trained, 1)} <= set(launched.processes)
        os.kill(get_pid(trained, 1), signal.SIGKILL)
        launched.wait_until(lambda: launched.poll() is not None, seconds=60)
        assert launched.returncode != 0
        launched.wait_until(lambda: not launched.processes, seconds=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rank", "number"),
    [
        pytest.param("fsdp2", 0, signal.SIGTERM, id="rank 0"),
        pytest.param("ddp", 1, signal.SIGUSR1, id="rank 1"),
    ],
)
def test_signal_to_one_rank_stops_all_after_the_same_step(
    harness: Harness, fork_server: ForkServer, strategy: str, rank: int, number: signal.Signals
) -> None:
    """Rank 0 takes two seconds longer to end: its agent must not kill it when the other rank is gone."""
    case = TrainingCase(strategy=strategy, config=LONG)  # type: ignore[arg-type]
    with training(harness, fork_server, case, **{END_SECONDS_VARIABLE: "2"}) as (launched, trained):
        os.kill(get_pid(trained, rank), number)
        launched.wait_until(lambda: launched.poll() is not None, seconds=60)
        assert launched.returncode != 0
        outcome = trained.outcome
        assert (outcome.status, outcome.exit_code) == ("stopped", ExitCode.PREEMPTED), launched.console
        ends = [json.loads((trained.paths.logs / f"end-{one}.json").read_text()) for one in (0, 1)]
        assert ends == [outcome.steps_done, outcome.steps_done]
        assert 0 < outcome.steps_done < 2000
        assert outcome.steps_done == len(trained.steps)
        assert list(trained.paths.checkpoint(outcome.steps_done).glob("*.safetensors"))
        assert "Traceback" not in launched.console.partition("torch/distributed/elastic")[0]
