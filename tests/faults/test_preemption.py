"""After a signal all ranks save the same step and exit with code 75; the resumed run is bit-exact."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

import pytest

from launcher.core.choices import Strategy
from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome
from tests.distributed.harness import Harness, TrainingCase
from tests.faults.conftest import TrainUninterrupted
from tests.faults.fork_server import ForkServer
from tests.faults.phase_recording_train import SIGNALS_VARIABLE
from tests.faults.random_kills import get_newest_step, load_step_rows
from tests.faults.restartable_run import (
    CONFIG,
    NUM_STEPS,
    RestartableRun,
    check_same,
    find_partial_files,
    launcher_train,
    make_flags,
    make_request,
    make_run,
    plan_run,
)

# The step at which it stops is not known here; an evaluation at that step is tested separately below.
NO_EVALUATION = {**CONFIG, "max_steps": 16, "evaluation_strategy": "no", "load_best_model_at_end": False}
TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
# A rank learns about the signal of another rank one step later, so the run stops two steps after the signal.
SIGNAL_STEP, STOP_STEP = 1, 3


def make_signal_variable(signals: Mapping[int, Sequence[signal.Signals]], step: int = SIGNAL_STEP) -> dict[str, str]:
    """Return the variable that sends signals to ranks after a step."""
    entries = [f"{step}:{rank}:{int(one)}" for rank, numbers in signals.items() for one in numbers]
    return {SIGNALS_VARIABLE: ",".join(entries)}


def check_stopped(run: RestartableRun, step: int) -> None:
    outcome = run.trained.outcome
    assert (outcome.status, outcome.exit_code, outcome.steps_done) == ("stopped", ExitCode.PREEMPTED, step)
    assert f"stopped by a signal after step {step}; `launcher train " in outcome.error
    assert f" --resume {run.paths.run_id} --runs-dir {run.paths.root.parent}` continues from " in outcome.error
    assert get_newest_step(run.paths) == step, "the step at which it stopped is saved"
    assert [row.step for row in load_step_rows(run.paths)] == list(range(1, step + 1))
    assert find_partial_files(run.paths) == []


@pytest.mark.parametrize(
    ("strategy", "signals"),
    [
        pytest.param("ddp", {1: [TERM]}, id="one rank"),
        pytest.param("fsdp2", {0: [TERM], 1: [TERM]}, id="all ranks", marks=pytest.mark.slow),
        pytest.param("zero2", {0: [USR1]}, id="SIGUSR1", marks=pytest.mark.slow),
        pytest.param("ddp", {0: [INT], 1: [INT]}, id="SIGINT", marks=pytest.mark.slow),
    ],
)
def test_signal_saves_one_step_and_resume_is_bit_exact(
    harness: Harness,
    fork_server: ForkServer,
    uninterrupted: TrainUninterrupted,
    strategy: Strategy,
    signals: Mapping[int, Sequence[signal.Signals]],
) -> None:
    case = TrainingCase(strategy=strategy, config=CONFIG)
    run = make_run(harness, case)
    stopped = fork_server.launch(run.command, **make_signal_variable(signals))
    assert stopped.returncode != 0
    check_stopped(run, STOP_STEP)
    resumed = fork_server.launch(run.command)
    assert resumed.returncode == 0, resumed.console
    assert run.trained.outcome.attempts[-1].from_step == STOP_STEP
    check_same(run.trained, uninterrupted(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp2", "zero2"],
)
def test_four_ranks_resume_bit_exact(
    harness: Harness, fork_server: ForkServer, uninterrupted: TrainUninterrupted, strategy: Strategy
) -> None:
    """With more than two ranks, the order of summation matters."""
    case = TrainingCase(strategy=strategy, ranks_per_node=4, config=CONFIG)
    run = make_run(harness, case)
    assert fork_server.launch(run.command, **make_signal_variable({3: [USR1]})).returncode != 0
    check_stopped(run, STOP_STEP)
    assert fork_server.launch(run.command).returncode == 0
    check_same(run.trained, uninterrupted(case))


@pytest.mark.slow
def test_second_signal_stops_immediately(
    harness: Harness, fork_server: ForkServer, uninterrupted: TrainUninterrupted
) -> None:
    """Nothing more is saved and the earlier checkpoints stay. A finished run is not started again."""
    case = TrainingCase(strategy="ddp", config=CONFIG)
    run = make_run(harness, case)
    assert fork_server.launch(run.command, **make_signal_variable({0: [TERM, TERM]}, step=3)).returncode != 0
    outcome = load_outcome(run.paths.outcome)
    assert outcome is not None
    assert (outcome.status, outcome.exit_code) == ("stopped", ExitCode.PREEMPTED)
    assert "stopped immediately" in outcome.error
    assert get_newest_step(run.paths) in (1, 2), "step 3 was just read back"
    assert fork_server.launch(run.command).returncode == 0
    check_same(run.trained, uninterrupted(case))
    before = run.paths.outcome.read_bytes()
    again = fork_server.launch(run.command)
    assert again.returncode == 0
    assert "this run is done" in again.console
    assert run.paths.outcome.read_bytes() == before


@pytest.mark.slow
def test_evaluation_at_the_stop_step_is_not_lost(
    harness: Harness, fork_server: ForkServer, uninterrupted: TrainUninterrupted
) -> None:
    """The run stops at an evaluation step, which may be the best one."""
    case = TrainingCase(strategy="ddp", config=CONFIG)
    run = make_run(harness, case)
    assert fork_server.launch(run.command, **make_signal_variable({0: [USR1]}, step=2)).returncode != 0
    check_stopped(run, 4)
    assert fork_server.launch(run.command).returncode == 0
    check_same(run.trained, uninterrupted(case))


@pytest.mark.slow
def test_signal_in_the_last_steps_lets_the_run_finish(
    harness: Harness, fork_server: ForkServer, uninterrupted: TrainUninterrupted
) -> None:
    """The last evaluation runs, too."""
    case = TrainingCase(strategy="ddp", config=CONFIG)
    run = make_run(harness, case)
    assert fork_server.launch(run.command, **make_signal_variable({1: [USR1]}, step=NUM_STEPS - 1)).returncode == 0
    assert run.trained.outcome.status == "done"
    check_same(run.trained, uninterrupted(case))


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([TERM], id="SIGTERM", marks=pytest.mark.slow),
        pytest.param([INT], id="SIGINT", marks=pytest.mark.slow),
        pytest.param([USR1], id="SIGUSR1", marks=pytest.mark.slow),
        pytest.param([TERM, TERM], id="twice", marks=pytest.mark.slow),
    ],
)
def test_signal_to_the_launcher(harness: Harness, fork_server: ForkServer, signals: Sequence[signal.Signals]) -> None:
    """Start by the command line, without the fork server; `--resume` finds the run itself."""
    manifest = harness.manifest(TrainingCase(strategy="ddp", config=NO_EVALUATION))
    flags = make_flags(manifest)
    uninterrupted = plan_run(harness, make_request(manifest))
    assert fork_server.launch(uninterrupted.command).returncode == 0
    paths = RunPaths(harness.runs / f"signaled-{'-'.join(number.name for number in signals)}")
    run = RestartableRun(planned=uninterrupted.planned, paths=paths)
    with harness.started(launcher_train(harness, *flags, "--run-id", run.paths.run_id)) as child:
        child.wait_until(lambda: len(load_step_rows(run.paths)) > 0)
        for number in signals:
            os.kill(child.process.pid, number)
            child.wait_until(lambda: "stopping" in child.console)
        ended = child.wait(60)
    assert ended.returncode == ExitCode.PREEMPTED, ended.console
    if len(signals) == 1:
        check_stopped(run, run.trained.outcome.steps_done)
        assert 0 < run.trained.outcome.steps_done < 16
    resumed = harness.launch(launcher_train(harness, str(manifest), "--resume"))
    assert resumed.returncode == 0, resumed.console
    assert len(run.trained.outcome.attempts) == 2
    check_same(run.trained, uninterrupted.trained)
