"""A stopped or dead rank or data worker is reported, and the run ends within the configured limit."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from launcher.core.errors import ExitCode
from launcher.core.processes import find_children
from launcher.core.run_paths import RunPaths
from tests.distributed.harness import Child, Harness, TrainedRun, TrainingCase, make_command
from tests.faults.fork_server import ForkServer, LaunchedProcesses

LIMIT_SECONDS = 8
SLOW = {"LAUNCHER_TEST_STEP_SECONDS": "1"}
LONG = {"max_steps": 200, "eval_steps": 200, "save_steps": 200}


def make_case(**changes: Any) -> TrainingCase:
    return TrainingCase(strategy="ddp", config=LONG, changes={"guards.hang_seconds": LIMIT_SECONDS, **changes})


def get_pid(paths: RunPaths, rank: int) -> int:
    placement: dict[str, int] = json.loads((paths.logs / f"placement-{rank}.json").read_text())
    return placement["pid"]


def wait_for_steps(child: Child | LaunchedProcesses, paths: RunPaths, num_ranks: int) -> None:
    child.wait_until(lambda: all((paths.logs / f"placement-{rank}.json").exists() for rank in range(num_ranks)))


def test_stopped_rank_is_reported(harness: Harness, fork_server: ForkServer) -> None:
    planned, paths = harness.write(make_case())
    with fork_server.started(make_command(planned, paths), **SLOW) as launched:
        wait_for_steps(launched, paths, 2)
        os.kill(get_pid(paths, 1), signal.SIGSTOP)
        stopped_at = time.monotonic()
        launched.wait_until(lambda: TrainedRun(paths).outcome.status != "running", 120)
        took = time.monotonic() - stopped_at
        outcome = TrainedRun(paths).outcome
    assert took < LIMIT_SECONDS + 30
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.RUN_FAILED)
    assert "training hangs: rank 0 has been training for" in outcome.error
    assert "rank 1 is frozen: " in outcome.error
    stacks = (paths.logs / "stacks-rank-0.txt").read_text()
    assert "train_step" in stacks, "the stack shows where it waits"
    assert str(paths.logs / "stacks-rank-0.txt") in outcome.error


def write_single_process_run(harness: Harness, **changes: Any) -> tuple[Any, RunPaths]:
    loader = {"loader.num_workers": 2, "loader.prefetch_factor": 2, "loader.persistent_workers": True}
    one = TrainingCase(
        strategy="single",
        ranks_per_node=1,
        config=LONG,
        changes={"guards.hang_seconds": LIMIT_SECONDS, **loader, **changes},
    )
    return harness.write(one)


def find_workers(paths: RunPaths) -> list[int]:
    return [pid for pid, _ in find_children(get_pid(paths, 0))]


@pytest.mark.slow
def test_stopped_data_worker_is_reported(harness: Harness) -> None:
    planned, paths = write_single_process_run(harness)
    with harness.started(make_command(planned, paths), LAUNCHER_TEST_STEP_SECONDS="0.2") as child:
        wait_for_steps(child, paths, 1)
        stopped = find_workers(paths)
        assert len(stopped) >= 2
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        took = child.wait_until(lambda: TrainedRun(paths).outcome.status != "running", 120)
        outcome = TrainedRun(paths).outcome
    assert took < LIMIT_SECONDS + 30
    assert outcome.exit_code == ExitCode.RUN_FAILED
    assert "rank 0 has been waiting for data for" in outcome.error
    assert all(f"{pid} (stopped)" in outcome.error for pid in stopped)


@pytest.mark.slow
def test_dead_data_worker_is_reported(harness: Harness) -> None:
    planned, paths = write_single_process_run(harness)
    with harness.started(make_command(planned, paths), LAUNCHER_TEST_STEP_SECONDS="0.2") as child:
        wait_for_steps(child, paths, 1)
        killed = find_workers(paths)[0]
        os.kill(killed, signal.SIGKILL)
        ended = child.wait(60)
        outcome = TrainedRun(paths).outcome
    assert ended.returncode != 0
    assert outcome.exit_code == ExitCode.RUN_FAILED
    assert "a data loader worker died" in outcome.error
    assert str(killed) in outcome.error


@pytest.mark.slow
def test_slow_steps_within_the_limit_are_no_hang(harness: Harness) -> None:
    """Each step takes nearly as long as the limit, and all of them together longer."""
    short = TrainingCase(
        strategy="single",
        ranks_per_node=1,
        config={"max_steps": 3, "eval_steps": 3, "save_steps": 3},
        changes={"guards.hang_seconds": 8},
    )
    planned, paths = harness.write(short)
    ended = harness.launch(make_command(planned, paths), LAUNCHER_TEST_STEP_SECONDS="5")
    assert ended.returncode == 0
    assert TrainedRun(paths).outcome.status == "done"
