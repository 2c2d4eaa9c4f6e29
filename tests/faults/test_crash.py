"""`kill -9` of any process at any moment: a restarted run is bit-exact with an uninterrupted one.

LAUNCHER_TORTURE=1 kills more than a hundred times. LAUNCHER_TORTURE_SEED repeats the random choices; the timing of
processes may still differ.
"""

from __future__ import annotations

import os
import random
import signal
from functools import partial

import pytest

from launcher.core.choices import Strategy
from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome
from tests.distributed.harness import Harness, TrainingCase
from tests.faults.conftest import TrainUninterrupted
from tests.faults.fork_server import ForkServer
from tests.faults.phase_recording_train import START_SECONDS_VARIABLE
from tests.faults.random_kills import (
    IS_TORTURE,
    Kill,
    KillLog,
    check_no_step_lost,
    get_newest_step,
    kill_once,
    load_step_rows,
)
from tests.faults.restartable_run import (
    CONFIG,
    check_same,
    launcher_train,
    make_flags,
    make_request,
    make_run,
    plan_run,
)

AIMS = ("saving", "training", "saving", "starting", "evaluating", "saving", "ending", "training")
NUM_KILLS = 36 if IS_TORTURE else 2
NUM_LAUNCHERS = 4 if IS_TORTURE else 1
MAX_KILLS_PER_RUN = 8


# `make test-all` kills each strategy a few times, `make torture` for half an hour.
STRATEGIES = [pytest.param(name, marks=() if IS_TORTURE else pytest.mark.slow) for name in ("ddp", "fsdp2", "zero2")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_run_killed_at_any_moment_resumes_bit_exact(
    harness: Harness, fork_server: ForkServer, uninterrupted: TrainUninterrupted, kill_log: KillLog, strategy: Strategy
) -> None:
    case = TrainingCase(strategy=strategy, config=CONFIG)
    rng = random.Random(f"{kill_log.seed} {strategy}")
    expected = uninterrupted(case)
    kills: list[Kill] = []
    while len(kills) < NUM_KILLS:
        run, num_before = make_run(harness, case), len(kills)
        while len(kills) < NUM_KILLS and len(kills) - num_before < MAX_KILLS_PER_RUN:
            aim = AIMS[len(kills) % len(AIMS)]
            kill = kill_once(fork_server, run.command, run.paths, strategy, aim, rng)
            if kill is not None:
                kills.append(kill)
                kill_log.add(kill)
            if run.is_done:
                break
        last = fork_server.launch(run.command)
        assert last.returncode == 0, last.console
        check_same(run.trained, expected)
    if IS_TORTURE:
        assert sum(kill.phase == "saving" for kill in kills) >= NUM_KILLS / 5, kill_log.describe()


def test_ranks_exit_if_agent_is_killed_during_start(harness: Harness, fork_server: ForkServer) -> None:
    """Ranks notice the death of an agent that they never saw alive, and do not block the next start."""
    run = make_run(harness, TrainingCase(strategy="ddp", config=CONFIG))
    with fork_server.started(run.command, **{START_SECONDS_VARIABLE: "1"}) as launched:
        launched.wait_until(lambda: len(launched.ranks) == 2)
        os.kill(launched.agent, signal.SIGKILL)
        launched.wait(60)
    assert not run.paths.outcome.exists()


def has_reached_step(paths: RunPaths, step: int, attempt: int, before: int) -> bool:
    """Return whether this attempt has reached a step: the previous one may have recorded steps without saving them."""
    outcome = load_outcome(paths.outcome)
    if outcome is None or len(outcome.attempts) < attempt or outcome.attempts[-1].from_step != before:
        return False
    return any(row.step >= step for row in load_step_rows(paths))


@pytest.mark.slow
def test_killed_launcher_leaves_no_process_and_resumes(
    harness: Harness, fork_server: ForkServer, kill_log: KillLog
) -> None:
    """Start by the command line, without the fork server: no process is left, and --resume finds the run."""
    rng = random.Random(f"{kill_log.seed} launcher")
    manifest = harness.manifest(TrainingCase(strategy="ddp", config={**CONFIG, "max_steps": 20}))
    uninterrupted = plan_run(harness, make_request(manifest), "launcher-uninterrupted")
    assert fork_server.launch(uninterrupted.command).returncode == 0
    run = plan_run(harness, make_request(manifest), "launcher-killed")
    flags = (*make_flags(manifest), "--resume", "launcher-killed")
    for attempt in range(1, NUM_LAUNCHERS + 1):
        before = get_newest_step(run.paths)
        kill_step = before + rng.randint(1, 3)
        with harness.started(launcher_train(harness, *flags)) as child:
            child.wait_until(partial(has_reached_step, run.paths, kill_step, attempt, before))
            os.kill(child.process.pid, signal.SIGKILL)
            child.wait_until(lambda: not child.pids(), seconds=20)
        check_no_step_lost(run.paths, before, has_begun=True)
        newest = get_newest_step(run.paths)
        kill_log.add(
            Kill(strategy="ddp", victim="launcher", aim="training", phase="training", save_stage="", newest=newest)
        )
    ended = harness.launch(launcher_train(harness, *flags))
    assert ended.returncode == 0, ended.console
    check_same(run.trained, uninterrupted.trained)
