"""`--resume` as a user gives it: what may not have changed since, and a bare `accelerate launch`."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.checkpoints import find_newest
from launcher.errors import ExitCode
from launcher.launch import ACCELERATE
from launcher.paths import RunPaths
from launcher.render import TRAIN_SCRIPT, Command
from tests.distributed.bench import Bench, Cell, Ended, Trained, change_json
from tests.faults.courses import (
    CONFIG,
    PHASED,
    Course,
    check_same,
    launcher_train,
    make_request,
    plan_course,
    read_told,
    resume_course,
)
from tests.faults.killing import newest_step
from tests.faults.phased_train import SIGNALS_VARIABLE
from tests.faults.warm import Warm

STOP_SOON = {SIGNALS_VARIABLE: f"1:0:{int(signal.SIGUSR1)}"}
SAVED = 3  # where that ends it


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A run of two ranks that was stopped in the midst of it, and its manifest."""

    course: Course
    manifest: Path
    rows: Path

    def files(self) -> dict[str, bytes]:
        paths = self.course.paths
        found = (file for file in paths.root.rglob("*") if file.is_file() and paths.logs not in file.parents)
        return {str(file.relative_to(paths.root)): file.read_bytes() for file in found}


@pytest.fixture
def cut(bench: Bench, warm: Warm, tmp_path: Path) -> Cut:
    """Rows of its own: tests change them."""
    manifest = bench.manifest(Cell(strategy="ddp", config=CONFIG))
    rows = bench.folder / f"rows-of-{tmp_path.name}.jsonl"
    shutil.copyfile(bench.folder / "rows-13.jsonl", rows)
    change_json(manifest, {"training.dataset.path": rows.name})
    course = plan_course(bench, make_request(manifest))
    assert warm.launch(course.command, **STOP_SOON).returncode != 0
    assert newest_step(course.paths) == SAVED
    return Cut(course=course, manifest=manifest, rows=rows)


def resume(bench: Bench, cut: Cut, *flags: str) -> Ended:
    return bench.launch(launcher_train(bench, str(cut.manifest), "--resume", cut.course.paths.run_id, *flags))


def test_a_manifest_that_was_edited_is_refused_before_anything_starts(bench: Bench, warm: Warm, cut: Cut) -> None:
    before = cut.files()
    change_json(cut.manifest, {"training.config.learning_rate": 0.5, "training.config.seed": 7})
    refused = resume(bench, cut)
    assert refused.returncode == ExitCode.WRONG_INPUT
    said = [line.strip() for line in refused.console.splitlines()]
    assert "optimizer.learning_rate: 0.002 before, 0.5 now" in said, refused.console
    assert "schedule.seed: 42 before, 7 now" in said
    assert any("--allow-drift" in line for line in said)
    assert "Traceback" not in refused.console
    assert cut.files() == before, "nothing was touched"
    # How it goes on with --allow-drift, but for the start of the processes.
    drifted = resume_course(bench, cut.course, make_request(cut.manifest), allow_drift=True)
    assert warm.launch(drifted.make_command("--allow-drift")).returncode == 0
    assert drifted.trained.outcome.attempts[-1].from_step == SAVED
    assert drifted.trained.outcome.status == "done"


def test_rows_that_were_edited_are_refused_by_the_training(bench: Bench, warm: Warm, cut: Cut) -> None:
    lines = cut.rows.read_text().splitlines()
    edited = lines[4].replace("a", "o")
    assert edited != lines[4]
    told = read_told(cut.course.paths)
    cut.rows.write_text("\n".join([*lines[:4], edited, *lines[5:]]) + "\n")
    resumed = resume_course(bench, cut.course, make_request(cut.manifest))
    refused = warm.launch(resumed.command)
    assert refused.returncode != 0
    outcome = resumed.trained.outcome
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.WRONG_INPUT)
    assert "is not what this run has trained so far\n  data: " in outcome.error
    assert "--allow-drift" in outcome.error
    assert newest_step(cut.course.paths) == SAVED
    assert read_told(cut.course.paths) == told, "nothing is lost"
    assert warm.launch(resumed.make_command("--allow-drift")).returncode == 0
    assert resumed.trained.outcome.attempts[-1].from_step == SAVED


@pytest.mark.slow
def test_rows_that_were_edited_by_the_command_line(bench: Bench, cut: Cut) -> None:
    lines = cut.rows.read_text().splitlines()
    cut.rows.write_text("\n".join(lines[1:]) + "\n")
    refused = resume(bench, cut)
    assert refused.returncode == ExitCode.WRONG_INPUT, refused.console
    assert "  data: " in refused.console
    assert resume(bench, cut, "--allow-drift").returncode == 0


def bare(bench: Bench, script: str, manifest: Path, *flags: str) -> Command:
    """As a user types it; only the port is any that is free."""
    config = ("--config_file", "accelerate_configs/ddp_2gpu.yaml", "--main_process_port", "0")
    run = ("--manifest", str(manifest), "--runs-dir", str(bench.runs), *flags)
    return Command(argv=(*ACCELERATE, *config, script, *run), environment={})


def test_a_bare_launch_is_taken_up(bench: Bench, warm: Warm) -> None:
    manifest = bench.manifest(Cell(strategy="ddp", config=CONFIG))
    full = ("--profile", "full")
    assert warm.launch(bare(bench, TRAIN_SCRIPT, manifest, *full, "--run-id", "whole")).returncode == 0
    assert warm.launch(bare(bench, PHASED, manifest, *full, "--run-id", "cut"), **STOP_SOON).returncode != 0
    paths = RunPaths(bench.runs / "cut")
    checkpoint, _ = find_newest(paths)
    assert checkpoint is not None
    assert checkpoint.manifest.step == SAVED
    resumed = warm.launch(bare(bench, TRAIN_SCRIPT, manifest, "--resume", "cut"))
    assert resumed.returncode == 0, resumed.console
    assert f"resuming after step {SAVED}" in resumed.console
    check_same(Trained(paths), Trained(RunPaths(bench.runs / "whole")))
