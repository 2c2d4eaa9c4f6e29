"""A signal: all ranks save at one step and end with exit code 75; started again, the run ends with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

import pytest

from launcher.choices import Strategy
from launcher.errors import ExitCode
from launcher.paths import RunPaths
from launcher.record import load_outcome
from tests.distributed.bench import Bench, Cell
from tests.faults.conftest import Undisturbed
from tests.faults.courses import (
    CONFIG,
    NUM_STEPS,
    Course,
    check_same,
    find_half_made,
    launcher_train,
    make_course,
    make_flags,
    make_request,
    plan_course,
)
from tests.faults.killing import newest_step, step_rows
from tests.faults.phased_train import SIGNALS_VARIABLE
from tests.faults.warm import Warm

# Where it will stop is not known here, and an evaluation that is due at that step is a case of its own, below.
NO_EVALUATION = {**CONFIG, "max_steps": 16, "evaluation_strategy": "no", "load_best_model_at_end": False}
TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
# A rank learns of another's signal one step later, so the run ends two steps behind the one that is named here.
ASKED_AT, ENDS_AT = 1, 3


def ask(signals: Mapping[int, Sequence[signal.Signals]], step: int = ASKED_AT) -> dict[str, str]:
    """Rank -> the signals that come behind a step."""
    told = [f"{step}:{rank}:{int(one)}" for rank, numbers in signals.items() for one in numbers]
    return {SIGNALS_VARIABLE: ",".join(told)}


def check_stopped(course: Course, step: int) -> None:
    outcome = course.trained.outcome
    assert (outcome.status, outcome.exit_code, outcome.steps_done) == ("stopped", ExitCode.PREEMPTED, step)
    assert f"stopped by a signal after step {step}" in outcome.error
    assert newest_step(course.paths) == step, "saved where it stopped"
    assert [row.step for row in step_rows(course.paths)] == list(range(1, step + 1))
    assert find_half_made(course.paths) == []


@pytest.mark.parametrize(
    ("strategy", "signals"),
    [
        pytest.param("ddp", {1: [TERM]}, id="one rank"),
        pytest.param("fsdp2", {0: [TERM], 1: [TERM]}, id="all ranks", marks=pytest.mark.slow),
        pytest.param("zero2", {0: [USR1]}, id="SIGUSR1", marks=pytest.mark.slow),
        pytest.param("ddp", {0: [INT], 1: [INT]}, id="SIGINT", marks=pytest.mark.slow),
    ],
)
def test_saved_at_one_step_and_taken_up(
    bench: Bench,
    warm: Warm,
    undisturbed: Undisturbed,
    strategy: Strategy,
    signals: Mapping[int, Sequence[signal.Signals]],
) -> None:
    cell = Cell(strategy=strategy, config=CONFIG)
    course = make_course(bench, cell)
    stopped = warm.launch(course.command, **ask(signals))
    assert stopped.returncode != 0
    check_stopped(course, ENDS_AT)
    resumed = warm.launch(course.command)
    assert resumed.returncode == 0, resumed.console
    assert course.trained.outcome.attempts[-1].from_step == ENDS_AT
    check_same(course.trained, undisturbed(cell))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp2", "zero2"],
)
def test_more_ranks_than_two(bench: Bench, warm: Warm, undisturbed: Undisturbed, strategy: Strategy) -> None:
    """Three or more numbers add up to other bits in another order."""
    cell = Cell(strategy=strategy, ranks_per_node=4, config=CONFIG)
    course = make_course(bench, cell)
    assert warm.launch(course.command, **ask({3: [USR1]})).returncode != 0
    check_stopped(course, ENDS_AT)
    assert warm.launch(course.command).returncode == 0
    check_same(course.trained, undisturbed(cell))


def test_a_second_signal_ends_it_at_once(bench: Bench, warm: Warm, undisturbed: Undisturbed) -> None:
    """Nothing is saved any more; what was saved before is what counts. And whoever is done is left alone."""
    cell = Cell(strategy="ddp", config=CONFIG)
    course = make_course(bench, cell)
    assert warm.launch(course.command, **ask({0: [TERM, TERM]}, step=3)).returncode != 0
    outcome = load_outcome(course.paths.outcome)
    assert outcome is not None
    assert (outcome.status, outcome.exit_code) == ("stopped", ExitCode.PREEMPTED)
    assert "stopped at once" in outcome.error
    assert newest_step(course.paths) in (1, 2), "step 3 was just read back"
    assert warm.launch(course.command).returncode == 0
    check_same(course.trained, undisturbed(cell))
    before = course.paths.outcome.read_bytes()
    again = warm.launch(course.command)
    assert again.returncode == 0
    assert "this run is done" in again.console
    assert course.paths.outcome.read_bytes() == before


def test_an_evaluation_is_not_lost(bench: Bench, warm: Warm, undisturbed: Undisturbed) -> None:
    """Stopped at a step that is evaluated: the best may be this one."""
    cell = Cell(strategy="ddp", config=CONFIG)
    course = make_course(bench, cell)
    assert warm.launch(course.command, **ask({0: [USR1]}, step=2)).returncode != 0
    check_stopped(course, 4)
    assert warm.launch(course.command).returncode == 0
    check_same(course.trained, undisturbed(cell))


def test_a_signal_in_the_last_steps_comes_too_late(bench: Bench, warm: Warm, undisturbed: Undisturbed) -> None:
    """The last evaluation is made, too."""
    cell = Cell(strategy="ddp", config=CONFIG)
    course = make_course(bench, cell)
    assert warm.launch(course.command, **ask({1: [USR1]}, step=NUM_STEPS - 1)).returncode == 0
    assert course.trained.outcome.status == "done"
    check_same(course.trained, undisturbed(cell))


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([TERM], id="SIGTERM", marks=pytest.mark.slow),
        pytest.param([INT], id="SIGINT", marks=pytest.mark.slow),
        pytest.param([USR1], id="SIGUSR1", marks=pytest.mark.slow),
        pytest.param([TERM, TERM], id="twice", marks=pytest.mark.slow),
    ],
)
def test_the_launcher_is_asked_to_stop(bench: Bench, warm: Warm, signals: Sequence[signal.Signals]) -> None:
    """Cold, by the command line, which finds the run to go on with by itself."""
    manifest = bench.manifest(Cell(strategy="ddp", config=NO_EVALUATION))
    flags = make_flags(manifest)
    whole = plan_course(bench, make_request(manifest))
    assert warm.launch(whole.command).returncode == 0
    paths = RunPaths(bench.runs / f"asked-{'-'.join(number.name for number in signals)}")
    course = Course(planned=whole.planned, paths=paths)
    with bench.started(launcher_train(bench, *flags, "--run-id", course.paths.run_id)) as child:
        child.wait_until(lambda: len(step_rows(course.paths)) > 0)
        for number in signals:
            os.kill(child.process.pid, number)
            child.wait_until(lambda: "stopping" in child.console)
        ended = child.wait(60)
    assert ended.returncode == ExitCode.PREEMPTED, ended.console
    if len(signals) == 1:
        check_stopped(course, course.trained.outcome.steps_done)
        assert 0 < course.trained.outcome.steps_done < 16
    resumed = bench.launch(launcher_train(bench, str(manifest), "--resume"))
    assert resumed.returncode == 0, resumed.console
    assert len(course.trained.outcome.attempts) == 2
    check_same(course.trained, whole.trained)
