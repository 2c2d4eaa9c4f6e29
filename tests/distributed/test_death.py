"""Somebody dies, or is asked to stop: nobody is left behind, nobody hangs, and all ranks stop after the same step."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launcher.errors import ExitCode
from launcher.metrics import load_metrics
from tests.distributed.bench import Bench, Cell, Child, Trained, make_command
from tests.distributed.watched_train import END_SECONDS_VARIABLE, STEP_SECONDS_VARIABLE

LONG = {"max_steps": 2000, "evaluation_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


@contextmanager
def training(bench: Bench, cell: Cell, **more: str) -> Iterator[tuple[Child, Trained]]:
    """A run of two ranks, in the midst of it."""
    planned, paths = bench.write(cell)
    trained = Trained(paths)
    with bench.started(make_command(planned, paths), **{STEP_SECONDS_VARIABLE: "0.3", **more}) as child:
        child.wait_until(lambda: paths.metrics.exists() and len(load_metrics(paths.metrics)) >= 2)
        yield child, trained


def pid_of(trained: Trained, rank: int) -> int:
    return trained.placement(rank)["pid"]


@pytest.mark.slow
def test_no_worker_outlives_a_killed_agent(bench: Bench) -> None:
    with training(bench, Cell(strategy="ddp", config=LONG)) as (child, trained):
        assert {pid_of(trained, 0), pid_of(trained, 1)} <= set(child.pids())
        os.kill(child.process.pid, signal.SIGKILL)
        child.wait_until(lambda: not child.pids(), seconds=10)


def test_a_killed_worker_ends_everything(bench: Bench) -> None:
    with training(bench, Cell(strategy="ddp", config=LONG)) as (child, trained):
        os.kill(pid_of(trained, 1), signal.SIGKILL)
        child.wait_until(lambda: child.process.poll() is not None, seconds=60)
        assert child.process.returncode != 0
        child.wait_until(lambda: not child.pids(), seconds=10)


@pytest.mark.parametrize(
    ("strategy", "rank", "number"),
    [
        pytest.param("fsdp2", 0, signal.SIGTERM, id="the first rank", marks=pytest.mark.slow),
        pytest.param("ddp", 1, signal.SIGUSR1, id="the second rank"),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    bench: Bench, strategy: str, rank: int, number: signal.Signals
) -> None:
    """The first rank takes two seconds more to end: it must not be killed by an agent that sees the other one gone."""
    cell = Cell(strategy=strategy, config=LONG)  # type: ignore[arg-type]
    with training(bench, cell, **{END_SECONDS_VARIABLE: "2"}) as (child, trained):
        os.kill(pid_of(trained, rank), number)
        child.wait_until(lambda: child.process.poll() is not None, seconds=60)
        assert child.process.returncode != 0
        outcome = trained.outcome
        assert (outcome.status, outcome.exit_code) == ("stopped", ExitCode.PREEMPTED), child.console
        ends = [json.loads((trained.paths.logs / f"end-{one}.json").read_text()) for one in (0, 1)]
        assert ends == [outcome.steps_done, outcome.steps_done]
        assert 0 < outcome.steps_done < 2000
        assert outcome.steps_done == len(trained.steps)
        assert list(trained.paths.checkpoint(outcome.steps_done).glob("*.safetensors"))
        assert "Traceback" not in child.console.partition("torch/distributed/elastic")[0]
