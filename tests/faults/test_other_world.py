"""One run on other ranks and by other engines in turn: the same packs, the same losses but for rounding."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from launcher import metrics
from launcher.errors import ExitCode
from launcher.inputs import Request
from tests.distributed.bench import Bench, Cell
from tests.distributed.test_matrix import largest_difference
from tests.faults.courses import (
    CONFIG,
    Course,
    launcher_train,
    make_flags,
    make_request,
    plan_course,
    resume_course,
)
from tests.faults.killing import newest_step, step_rows
from tests.faults.phased_train import SIGNALS_VARIABLE
from tests.faults.warm import Warm
from tests.training.builders import relative_difference

World = tuple[str, int]  # strategy, ranks

LOSS = 1e-5
ADAPTER = 1e-3
# Which random numbers dropout draws depends on how packs are dealt to ranks: there is none.
NO_DROPOUT = {**CONFIG, "dropout": 0.0, "max_steps": 12}


def stop_soon(warm: Warm, course: Course) -> None:
    """Behind the next step but one, or but two."""
    step = newest_step(course.paths) + 1
    ended = warm.launch(course.command, **{SIGNALS_VARIABLE: f"{step}:0:{int(signal.SIGUSR1)}"})
    assert ended.returncode != 0
    assert course.trained.outcome.exit_code == ExitCode.PREEMPTED, ended.console


def check_near(course: Course, undisturbed: Course) -> None:
    trained, expected = course.trained, undisturbed.trained
    assert trained.outcome.status == "done"
    assert [row.step for row in step_rows(course.paths)] == list(range(1, len(expected.steps) + 1))
    assert trained.packs == expected.packs
    assert largest_difference(trained, expected, metrics.TRAIN_LOSS) < LOSS
    assert relative_difference(trained.weights, expected.weights) < ADAPTER


@pytest.mark.parametrize(
    "worlds",
    [
        pytest.param([("ddp", 2), ("ddp", 1), ("fsdp2", 2), ("zero2", 2)], id="2-1-2", marks=pytest.mark.slow),
        pytest.param([("zero2", 2), ("fsdp2", 3), ("ddp", 2)], id="2-3-2", marks=pytest.mark.slow),
        pytest.param([("fsdp2", 2), ("zero3", 2), ("zero1", 2), ("fsdp2", 2)], id="engines", marks=pytest.mark.slow),
    ],
)
def test_a_run_wanders(bench: Bench, warm: Warm, worlds: Sequence[World]) -> None:
    manifest = bench.manifest(Cell(strategy="ddp", config=NO_DROPOUT))
    undisturbed = plan_course(bench, make_request(manifest))
    assert warm.launch(undisturbed.command).returncode == 0
    first, *others = worlds
    course = plan_course(bench, make_request(manifest, *first))
    for strategy, num_ranks in others:
        stop_soon(warm, course)
        given = Request(expert=str(manifest), strategy=strategy, cpu_ranks_per_node=num_ranks)  # type: ignore[arg-type]
        course = resume_course(bench, course, given)
        assert (course.planned.plan.strategy, course.planned.plan.batch.num_ranks) == (strategy, num_ranks)
    ended = warm.launch(course.command)
    assert ended.returncode == 0, ended.console
    check_near(course, undisturbed)
    assert len(course.trained.outcome.attempts) == len(worlds)
    began = [attempt.from_step for attempt in course.trained.outcome.attempts]
    assert began[0] == 0
    assert began == sorted(set(began)), "each went on from the one before"
    plans = sorted(file.name for file in course.paths.logs.glob("plan-of-attempt-*.json"))
    assert plans == [f"plan-of-attempt-{number}.json" for number in range(1, len(worlds))]


@pytest.mark.slow
def test_by_the_command_line(bench: Bench, warm: Warm) -> None:
    """Cold: flags of --resume replace those that the run was begun with."""
    manifest = bench.manifest(Cell(strategy="ddp", config=NO_DROPOUT))
    undisturbed = plan_course(bench, make_request(manifest))
    assert warm.launch(undisturbed.command).returncode == 0
    course = plan_course(bench, make_request(manifest), "wanders")
    stop_soon(warm, course)
    flags = (str(manifest), "--resume", "wanders", "--strategy", "fsdp2", "--cpu-ranks", "2")
    ended = bench.launch(launcher_train(bench, *flags))
    assert ended.returncode == 0, ended.console
    check_near(course, undisturbed)
    again = bench.launch(launcher_train(bench, *make_flags(manifest), "--resume", "wanders"))
    assert again.returncode == 0
    assert "this run is done" in again.console
