"""`kill -9` of any process at any moment: started again, a run ends with the same bits as one that nobody disturbed.

LAUNCHER_TORTURE=1 kills more than a hundred times. LAUNCHER_TORTURE_SEED repeats what was rolled, as far as processes
repeat themselves.
"""

from __future__ import annotations

import os
import random
import signal
from functools import partial

import pytest

from launcher.choices import Strategy
from launcher.paths import RunPaths
from launcher.record import load_outcome
from tests.distributed.bench import Bench, Cell
from tests.faults.conftest import Undisturbed
from tests.faults.courses import (
    CONFIG,
    check_same,
    launcher_train,
    make_course,
    make_flags,
    make_request,
    plan_course,
)
from tests.faults.killing import IS_TORTURE, Kill, Tally, check_nothing_lost, kill_once, newest_step, step_rows
from tests.faults.phased_train import START_SECONDS_VARIABLE
from tests.faults.warm import Warm

AIMS = ("saving", "training", "saving", "starting", "evaluating", "saving", "ending", "training")
NUM_KILLS = 36 if IS_TORTURE else 2
NUM_LAUNCHERS = 4 if IS_TORTURE else 1
MOST_KILLS_OF_A_RUN = 8


# One engine of DeepSpeed's is killed by `make test-all`, and for half an hour by `make torture`.
ZERO = pytest.param("zero2", marks=() if IS_TORTURE else pytest.mark.slow)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow), ZERO])
def test_killed_at_any_moment(
    bench: Bench, warm: Warm, undisturbed: Undisturbed, tally: Tally, strategy: Strategy
) -> None:
    cell = Cell(strategy=strategy, config=CONFIG)
    dice = random.Random(f"{tally.seed} {strategy}")
    expected = undisturbed(cell)
    kills: list[Kill] = []
    while len(kills) < NUM_KILLS:
        course, num_before = make_course(bench, cell), len(kills)
        while len(kills) < NUM_KILLS and len(kills) - num_before < MOST_KILLS_OF_A_RUN:
            aim = AIMS[len(kills) % len(AIMS)]
            kill = kill_once(warm, course.command, course.paths, strategy, aim, dice)
            if kill is not None:
                kills.append(kill)
                tally.add(kill)
            if course.is_done:
                break
        last = warm.launch(course.command)
        assert last.returncode == 0, last.console
        check_same(course.trained, expected)
    if IS_TORTURE:
        assert sum(kill.phase == "saving" for kill in kills) >= NUM_KILLS / 5, tally.describe()


def test_an_agent_killed_while_its_ranks_start(bench: Bench, warm: Warm) -> None:
    """They find out although they never saw it alive, and do not stand in the way of the next start."""
    course = make_course(bench, Cell(strategy="ddp", config=CONFIG))
    with warm.started(course.command, **{START_SECONDS_VARIABLE: "1"}) as launched:
        launched.wait_until(lambda: len(launched.ranks) == 2)
        os.kill(launched.agent, signal.SIGKILL)
        launched.wait(10)
    assert not course.paths.outcome.exists()


def has_come_to(paths: RunPaths, step: int, attempt: int, before: int) -> bool:
    """In this attempt, which tells where it began: the one before may have told of steps that it did not save."""
    outcome = load_outcome(paths.outcome)
    if outcome is None or len(outcome.attempts) < attempt or outcome.attempts[-1].from_step != before:
        return False
    return any(row.step >= step for row in step_rows(paths))


@pytest.mark.slow
def test_a_killed_launcher(bench: Bench, warm: Warm, tally: Tally) -> None:
    """Cold, by the command line. Nobody is left behind, and --resume finds the run."""
    dice = random.Random(f"{tally.seed} launcher")
    manifest = bench.manifest(Cell(strategy="ddp", config={**CONFIG, "max_steps": 20}))
    undisturbed = plan_course(bench, make_request(manifest), "launcher-undisturbed")
    assert warm.launch(undisturbed.command).returncode == 0
    course = plan_course(bench, make_request(manifest), "launcher-killed")
    flags = (*make_flags(manifest), "--resume", "launcher-killed")
    for attempt in range(1, NUM_LAUNCHERS + 1):
        before = newest_step(course.paths)
        wanted = before + dice.randint(1, 3)
        with bench.started(launcher_train(bench, *flags)) as child:
            child.wait_until(partial(has_come_to, course.paths, wanted, attempt, before))
            os.kill(child.process.pid, signal.SIGKILL)
            child.wait_until(lambda: not child.pids(), seconds=20)
        check_nothing_lost(course.paths, before, has_begun=True)
        newest = newest_step(course.paths)
        tally.add(Kill(strategy="ddp", victim="launcher", aim="training", phase="training", piece="", newest=newest))
    ended = bench.launch(launcher_train(bench, *flags))
    assert ended.returncode == 0, ended.console
    check_same(course.trained, undisturbed.trained)
