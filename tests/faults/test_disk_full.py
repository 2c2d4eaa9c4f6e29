"""A full disk: checkpoints stay, partial files are deleted, the run reports the reason and can be resumed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core.choices import Strategy
from launcher.core.errors import ExitCode, RunFailedError
from launcher.launch.write_run import write_run
from launcher.runs.checkpoints import BestState, Checkpoint, read_checkpoint
from launcher.training.checkpoint.progress import compute_progress
from launcher.training.checkpoint.snapshot import Snapshot, take_snapshot, write_snapshot
from launcher.training.engine.run import TrainingRun
from tests.distributed.harness import Harness, TrainingCase
from tests.faults.conftest import TrainUninterrupted
from tests.faults.fork_server import ForkServer
from tests.faults.phase_recording_train import STEP_SECONDS_VARIABLE
from tests.faults.random_kills import get_newest_step, load_step_rows
from tests.faults.restartable_run import CONFIG, RestartableRun, check_same, find_partial_files
from tests.training.builders import build, make_plan, make_uneven_packs, write_base, write_store

DISK_BYTES = 8 << 20
PAGE = 4096


class Disk:
    """A small disk with a file that takes up as much space as a test needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def leave_free(self, num_bytes: int) -> None:
        self.free_space()
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free - num_bytes)

    def free_space(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.folder).free


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_run_on_disk(disk: Disk, harness: Harness, case: TrainingCase, **guards: str) -> RestartableRun:
    planned = harness.plan(case)
    plan = planned.plan.model_copy(update={"guards": planned.plan.guards.model_copy(update=guards)})
    planned = replace(planned, plan=plan)
    return RestartableRun(planned=planned, paths=write_run(planned, disk.folder / "runs", "small"))


def compute_folder_size(folder: Path) -> int:
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_run_fails_on_full_disk_and_resumes_with_free_space(
    disk: Disk, harness: Harness, fork_server: ForkServer, uninterrupted: TrainUninterrupted, strategy: Strategy
) -> None:
    expected = uninterrupted(TrainingCase(strategy=strategy, config=CONFIG))
    case = TrainingCase(strategy=strategy, config={**CONFIG, "save_total_limit": 5})
    one = compute_folder_size(expected.paths.checkpoint(6))
    run = make_run_on_disk(disk, harness, case)
    disk.leave_free(int(2.6 * one))
    ended = fork_server.launch(run.command)
    assert ended.returncode != 0
    outcome = run.trained.outcome
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.RUN_FAILED), ended.console
    assert "step-000003 cannot be written: " in outcome.error
    assert "No space left on device" in outcome.error
    assert "hint: the disk is full" in outcome.error
    assert "Traceback" not in outcome.error
    assert get_newest_step(run.paths) == 2
    assert find_partial_files(run.paths) == []
    assert load_step_rows(run.paths)[-1].step in (3, 4)
    disk.free_space()
    assert fork_server.launch(run.command).returncode == 0
    assert run.trained.outcome.attempts[-1].from_step == 2
    check_same(run.trained, expected)


@pytest.mark.slow
def test_on_save_error_continue_trains_without_checkpoint(
    disk: Disk, harness: Harness, fork_server: ForkServer, uninterrupted: TrainUninterrupted
) -> None:
    """`--on-save-error continue` warns and tries the next checkpoint."""
    case = TrainingCase(strategy="single", ranks_per_node=1, config={**CONFIG, "save_total_limit": 5})
    expected = uninterrupted(case)
    run = make_run_on_disk(disk, harness, case, save_errors="continue")
    disk.leave_free(int(1.6 * compute_folder_size(expected.paths.checkpoint(6))))
    with fork_server.started(run.command, **{STEP_SECONDS_VARIABLE: "0.3"}) as launched:
        launched.wait_until(lambda: "checkpoint not saved: " in launched.console or launched.poll() is not None)
        disk.free_space()
        assert launched.wait() == 0, launched.console
    kept = {folder.name for folder in run.paths.checkpoints.iterdir()}
    assert "step-000001" in kept
    assert "step-000002" not in kept
    assert "step-000006" in kept
    check_same(run.trained, expected)


def test_disk_full_at_any_write(disk: Disk, tmp_path: Path) -> None:
    """For every number of free pages, the checkpoint is complete, or absent with a clear error."""
    plan = make_plan(write_base(tmp_path / "base"))
    run = build(plan, write_store(tmp_path / "store", make_uneven_packs()), disk.folder / "run")
    best = BestState(step=None, value=None, worse_in_a_row=0)
    snapshot = take_snapshot(run, compute_progress(run, 0), best)
    assert snapshot is not None
    folder = write_snapshot(run, snapshot)
    needed = compute_folder_size(folder)
    shutil.rmtree(folder)
    was_written = []
    for num_bytes in range(0, needed + 3 * PAGE, PAGE):
        disk.leave_free(num_bytes)
        error = try_to_write(run, snapshot)
        was_written.append(error is None)
        assert error is None or "No space left on device" in error
        assert os.listdir(run.paths.checkpoints) == ([folder.name] if error is None else [])  # noqa: PTH208
        assert error is not None or isinstance(read_checkpoint(folder), Checkpoint)
        shutil.rmtree(folder, ignore_errors=True)
    assert was_written == sorted(was_written), "it fits from some size on"
    assert set(was_written) == {False, True}


def try_to_write(run: TrainingRun, snapshot: Snapshot) -> str | None:
    try:
        write_snapshot(run, snapshot)
    except RunFailedError as error:
        return str(error)
    return None
