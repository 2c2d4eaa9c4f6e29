"""One run resumed with other numbers of ranks and other strategies: the same packs, and equal losses up to rounding."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from launcher.core import metrics
from launcher.core.errors import ExitCode
from launcher.request.request import Request
from tests.distributed.harness import Harness, TrainingCase
from tests.distributed.test_matrix import largest_difference
from tests.faults.fork_server import ForkServer
from tests.faults.phase_recording_train import SIGNALS_VARIABLE
from tests.faults.random_kills import get_newest_step, load_step_rows
from tests.faults.restartable_run import (
    CONFIG,
    RestartableRun,
    launcher_train,
    make_flags,
    make_request,
    plan_run,
    resume_run,
)
from tests.training.builders import relative_difference

Topology = tuple[str, int]  # strategy, ranks

LOSS = 1e-5
ADAPTER = 1e-3
# The random numbers of dropout depend on how packs are assigned to ranks: no dropout here.
NO_DROPOUT = {**CONFIG, "dropout": 0.0, "max_steps": 12}


def stop_after_signal(fork_server: ForkServer, run: RestartableRun) -> None:
    """Stop after two or three more steps."""
    step = get_newest_step(run.paths) + 1
    ended = fork_server.launch(run.command, **{SIGNALS_VARIABLE: f"{step}:0:{int(signal.SIGUSR1)}"})
    assert ended.returncode != 0
    assert run.trained.outcome.exit_code == ExitCode.PREEMPTED, ended.console


def check_close(run: RestartableRun, uninterrupted: RestartableRun) -> None:
    trained, expected = run.trained, uninterrupted.trained
    assert trained.outcome.status == "done"
    assert [row.step for row in load_step_rows(run.paths)] == list(range(1, len(expected.steps) + 1))
    assert trained.packs == expected.packs
    assert largest_difference(trained, expected, metrics.TRAIN_LOSS) < LOSS
    assert relative_difference(trained.weights, expected.weights) < ADAPTER


@pytest.mark.parametrize(
    "topologies",
    [
        pytest.param([("ddp", 2), ("ddp", 1), ("fsdp2", 2), ("zero2", 2)], id="2-1-2", marks=pytest.mark.slow),
        pytest.param([("zero2", 2), ("fsdp2", 3), ("ddp", 2)], id="2-3-2", marks=pytest.mark.slow),
        pytest.param([("fsdp2", 2), ("zero3", 2), ("zero1", 2), ("fsdp2", 2)], id="engines", marks=pytest.mark.slow),
    ],
)
def test_resume_with_other_ranks_and_strategies(
    harness: Harness, fork_server: ForkServer, topologies: Sequence[Topology]
) -> None:
    manifest = harness.manifest(TrainingCase(strategy="ddp", config=NO_DROPOUT))
    uninterrupted = plan_run(harness, make_request(manifest))
    assert fork_server.launch(uninterrupted.command).returncode == 0
    first, *others = topologies
    run = plan_run(harness, make_request(manifest, *first))
    for strategy, num_ranks in others:
        stop_after_signal(fork_server, run)
        request = Request(expert=str(manifest), strategy=strategy, cpu_ranks_per_node=num_ranks)  # type: ignore[arg-type]
        run = resume_run(harness, run, request)
        assert (run.planned.plan.strategy, run.planned.plan.batch.num_ranks) == (strategy, num_ranks)
    ended = fork_server.launch(run.command)
    assert ended.returncode == 0, ended.console
    check_close(run, uninterrupted)
    assert len(run.trained.outcome.attempts) == len(topologies)
    first_steps = [attempt.from_step for attempt in run.trained.outcome.attempts]
    assert first_steps[0] == 0
    assert first_steps == sorted(set(first_steps)), "each attempt resumed from the previous one"
    plans = sorted(file.name for file in run.paths.logs.glob("plan-of-attempt-*.json"))
    assert plans == [f"plan-of-attempt-{number}.json" for number in range(1, len(topologies))]


@pytest.mark.slow
def test_resume_with_other_strategy_by_command_line(harness: Harness, fork_server: ForkServer) -> None:
    """Without the fork server: flags given with --resume replace those of the first start."""
    manifest = harness.manifest(TrainingCase(strategy="ddp", config=NO_DROPOUT))
    uninterrupted = plan_run(harness, make_request(manifest))
    assert fork_server.launch(uninterrupted.command).returncode == 0
    run = plan_run(harness, make_request(manifest), "moved")
    stop_after_signal(fork_server, run)
    flags = (str(manifest), "--resume", "moved", "--strategy", "fsdp2", "--cpu-ranks", "2")
    ended = harness.launch(launcher_train(harness, *flags))
    assert ended.returncode == 0, ended.console
    check_close(run, uninterrupted)
    again = harness.launch(launcher_train(harness, *make_flags(manifest), "--resume", "moved"))
    assert again.returncode == 0
    assert "this run is done" in again.console
