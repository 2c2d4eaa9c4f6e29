"""A rank or a data worker that is stopped, or dies: named, and the run ended, within the limit that was set."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from launcher.errors import ExitCode
from launcher.paths import RunPaths
from launcher.processes import find_children
from tests.distributed.bench import Bench, Cell, Child, Trained, make_command, write_bench

LIMIT_SECONDS = 12
SLOW = {"LAUNCHER_TEST_STEP_SECONDS": "1"}
LONG = {"max_steps": 200, "eval_steps": 200, "save_steps": 200}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return write_bench(tmp_path_factory.mktemp("hang"))


def cell(**changes: Any) -> Cell:
    return Cell(strategy="ddp", config=LONG, changes={"guards.hang_seconds": LIMIT_SECONDS, **changes})


def pid_of(paths: RunPaths, rank: int) -> int:
    placement: dict[str, int] = json.loads((paths.logs / f"placement-{rank}.json").read_text())
    return placement["pid"]


def wait_for_steps(child: Child, paths: RunPaths, num_ranks: int) -> None:
    child.wait_until(lambda: all((paths.logs / f"placement-{rank}.json").exists() for rank in range(num_ranks)))


def test_a_rank_that_is_stopped_is_named(bench: Bench) -> None:
    planned, paths = bench.write(cell())
    with bench.started(make_command(planned, paths), **SLOW) as child:
        wait_for_steps(child, paths, 2)
        os.kill(pid_of(paths, 1), signal.SIGSTOP)
        took = child.wait_until(lambda: Trained(paths).outcome.status != "running", 120)
        outcome = Trained(paths).outcome
    assert took < LIMIT_SECONDS + 30
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.RUN_FAILED)
    assert "the training makes no progress: rank 0 has been training for" in outcome.error
    assert "rank 1 is frozen: nothing was" in outcome.error
    stacks = (paths.logs / "stacks-rank-0.txt").read_text()
    assert "train_step" in stacks, "where it waits"
    assert str(paths.logs / "stacks-rank-0.txt") in outcome.error


def alone(bench: Bench, **changes: Any) -> tuple[Any, RunPaths]:
    loader = {"loader.num_workers": 2, "loader.prefetch_factor": 2, "loader.persistent_workers": True}
    one = Cell(
        strategy="single",
        ranks_per_node=1,
        config=LONG,
        changes={"guards.hang_seconds": LIMIT_SECONDS, **loader, **changes},
    )
    return bench.write(one)


def find_workers(paths: RunPaths) -> list[int]:
    return [pid for pid, _ in find_children(pid_of(paths, 0))]


@pytest.mark.slow
def test_a_data_worker_that_is_stopped_is_named(bench: Bench) -> None:
    planned, paths = alone(bench)
    with bench.started(make_command(planned, paths), LAUNCHER_TEST_STEP_SECONDS="0.2") as child:
        wait_for_steps(child, paths, 1)
        stopped = find_workers(paths)
        assert len(stopped) >= 2
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        took = child.wait_until(lambda: Trained(paths).outcome.status != "running", 120)
        outcome = Trained(paths).outcome
    assert took < LIMIT_SECONDS + 30
    assert outcome.exit_code == ExitCode.RUN_FAILED
    assert "rank 0 has been waiting for data for" in outcome.error
    assert all(f"{pid} (stopped)" in outcome.error for pid in stopped)


@pytest.mark.slow
def test_a_data_worker_that_dies_is_named(bench: Bench) -> None:
    planned, paths = alone(bench)
    with bench.started(make_command(planned, paths), LAUNCHER_TEST_STEP_SECONDS="0.2") as child:
        wait_for_steps(child, paths, 1)
        killed = find_workers(paths)[0]
        os.kill(killed, signal.SIGKILL)
        ended = child.wait(60)
        outcome = Trained(paths).outcome
    assert ended.returncode != 0
    assert outcome.exit_code == ExitCode.RUN_FAILED
    assert "a data worker died" in outcome.error
    assert str(killed) in outcome.error


@pytest.mark.slow
def test_a_training_that_moves_is_left_alone(bench: Bench) -> None:
    """Steps that take nearly as long as the limit, and more of them than would fit into it."""
    short = Cell(
        strategy="single",
        ranks_per_node=1,
        config={"max_steps": 3, "eval_steps": 3, "save_steps": 3},
        changes={"guards.hang_seconds": 8},
    )
    planned, paths = bench.write(short)
    ended = bench.launch(make_command(planned, paths), LAUNCHER_TEST_STEP_SECONDS="5")
    assert ended.returncode == 0
    assert Trained(paths).outcome.status == "done"
