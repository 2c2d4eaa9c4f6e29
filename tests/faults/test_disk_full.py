"""A disk that is full: what was saved stays, what was half-made goes, the run says why it ended, and goes on later."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.checkpoints import BestState, Checkpoint, read_checkpoint
from launcher.choices import Strategy
from launcher.errors import ExitCode, RunFailedError
from launcher.launch import write_run
from launcher.training.checkpoint import Snapshot, take_snapshot, write_snapshot
from launcher.training.position import find_position
from launcher.training.run import Run
from tests.distributed.bench import Bench, Cell
from tests.faults.conftest import Undisturbed
from tests.faults.courses import CONFIG, Course, check_same, find_half_made
from tests.faults.killing import newest_step, step_rows
from tests.faults.phased_train import STEP_SECONDS_VARIABLE
from tests.faults.warm import Warm
from tests.training.builders import build, make_plan, make_uneven_packs, write_base, write_store

DISK_BYTES = 8 << 20
PAGE = 4096


class Disk:
    """A small one, with a file on it that takes up as much room as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def leave(self, num_bytes: int) -> None:
        self.make_room()
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free - num_bytes)

    def make_room(self) -> None:
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


def make_course_on(disk: Disk, bench: Bench, cell: Cell, **guards: str) -> Course:
    planned = bench.plan(cell)
    plan = planned.plan.model_copy(update={"guards": planned.plan.guards.model_copy(update=guards)})
    planned = replace(planned, plan=plan)
    return Course(planned=planned, paths=write_run(planned, disk.folder / "runs", "small"))


def size_of(folder: Path) -> int:
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_the_run_ends_and_goes_on_where_there_is_room(
    disk: Disk, bench: Bench, warm: Warm, undisturbed: Undisturbed, strategy: Strategy
) -> None:
    cell = Cell(strategy=strategy, config={**CONFIG, "save_total_limit": 5})
    expected = undisturbed(cell)
    one = size_of(expected.paths.checkpoint(6))
    course = make_course_on(disk, bench, cell)
    disk.leave(int(2.6 * one))
    ended = warm.launch(course.command)
    assert ended.returncode != 0
    outcome = course.trained.outcome
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.RUN_FAILED), ended.console
    assert "step-000003 cannot be written: " in outcome.error
    assert "No space left on device" in outcome.error
    assert "hint: is the disk full" in outcome.error
    assert "Traceback" not in outcome.error
    assert newest_step(course.paths) == 2
    assert find_half_made(course.paths) == []
    assert step_rows(course.paths)[-1].step in (3, 4)
    disk.make_room()
    assert warm.launch(course.command).returncode == 0
    assert course.trained.outcome.attempts[-1].from_step == 2
    check_same(course.trained, expected)


@pytest.mark.slow
def test_a_run_may_go_on_without_a_checkpoint(disk: Disk, bench: Bench, warm: Warm, undisturbed: Undisturbed) -> None:
    """`--on-save-error continue`: told, and the next one is tried again."""
    cell = Cell(strategy="single", ranks_per_node=1, config={**CONFIG, "save_total_limit": 5})
    expected = undisturbed(cell)
    course = make_course_on(disk, bench, cell, save_errors="continue")
    disk.leave(int(1.6 * size_of(expected.paths.checkpoint(6))))
    with warm.started(course.command, **{STEP_SECONDS_VARIABLE: "0.3"}) as launched:
        launched.wait_until(lambda: "warning: no checkpoint: " in launched.console or launched.poll() is not None)
        disk.make_room()
        assert launched.wait() == 0, launched.console
    kept = {folder.name for folder in course.paths.checkpoints.iterdir()}
    assert "step-000001" in kept
    assert "step-000002" not in kept
    assert "step-000006" in kept
    check_same(course.trained, expected)


def test_wherever_the_room_ends(disk: Disk, tmp_path: Path) -> None:
    """Page by page: a checkpoint is whole, or it is not there and the error says so."""
    plan = make_plan(write_base(tmp_path / "base"))
    run = build(plan, write_store(tmp_path / "store", make_uneven_packs()), disk.folder / "run")
    best = BestState(step=None, value=None, worse_in_a_row=0)
    snapshot = take_snapshot(run, find_position(run, 0), best)
    assert snapshot is not None
    folder = write_snapshot(run, snapshot)
    needed = size_of(folder)
    shutil.rmtree(folder)
    was_whole = []
    for num_bytes in range(0, needed + 3 * PAGE, PAGE):
        disk.leave(num_bytes)
        error = try_to_write(run, snapshot)
        was_whole.append(error is None)
        assert error is None or "No space left on device" in error
        assert os.listdir(run.paths.checkpoints) == ([folder.name] if error is None else [])  # noqa: PTH208
        assert error is not None or isinstance(read_checkpoint(folder), Checkpoint)
        shutil.rmtree(folder, ignore_errors=True)
    assert was_whole == sorted(was_whole), "from some size on it fits"
    assert set(was_whole) == {False, True}


def try_to_write(run: Run, snapshot: Snapshot) -> str | None:
    try:
        write_snapshot(run, snapshot)
    except RunFailedError as error:
        return str(error)
    return None
