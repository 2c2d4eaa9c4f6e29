"""`--resume` on the command line: refused changes of the inputs, and a plain `accelerate launch`."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.launch.start import ACCELERATE
from launcher.render import TRAIN_SCRIPT, Command
from launcher.runs.checkpoints import find_newest
from tests.distributed.harness import Harness, ProcessResult, TrainedRun, TrainingCase, change_json
from tests.faults.fork_server import ForkServer
from tests.faults.phase_recording_train import SIGNALS_VARIABLE
from tests.faults.random_kills import get_newest_step
from tests.faults.restartable_run import (
    CONFIG,
    PHASE_RECORDING_SCRIPT,
    RestartableRun,
    check_same,
    launcher_train,
    load_recorded_values,
    make_request,
    plan_run,
    resume_run,
)

STOP_SOON = {SIGNALS_VARIABLE: f"1:0:{int(signal.SIGUSR1)}"}
SAVED = 3  # the step at which it stops


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptedRun:
    """A stopped run of two ranks, its manifest and its rows."""

    run: RestartableRun
    manifest: Path
    rows: Path

    def files(self) -> dict[str, bytes]:
        paths = self.run.paths
        found = (file for file in paths.root.rglob("*") if file.is_file() and paths.logs not in file.parents)
        return {str(file.relative_to(paths.root)): file.read_bytes() for file in found}


@pytest.fixture
def interrupted(harness: Harness, fork_server: ForkServer, tmp_path: Path) -> InterruptedRun:
    """Train and stop a run with a copy of the rows, which tests change."""
    manifest = harness.manifest(TrainingCase(strategy="ddp", config=CONFIG))
    rows = harness.folder / f"rows-of-{tmp_path.name}.jsonl"
    shutil.copyfile(harness.folder / "rows-13.jsonl", rows)
    change_json(manifest, {"training.dataset.path": rows.name})
    run = plan_run(harness, make_request(manifest))
    assert fork_server.launch(run.command, **STOP_SOON).returncode != 0
    assert get_newest_step(run.paths) == SAVED
    return InterruptedRun(run=run, manifest=manifest, rows=rows)


def resume(harness: Harness, interrupted: InterruptedRun, *flags: str) -> ProcessResult:
    return harness.launch(
        launcher_train(harness, str(interrupted.manifest), "--resume", interrupted.run.paths.run_id, *flags)
    )


def test_edited_manifest_is_refused_before_start(
    harness: Harness, fork_server: ForkServer, interrupted: InterruptedRun
) -> None:
    before = interrupted.files()
    change_json(interrupted.manifest, {"training.config.learning_rate": 0.5, "training.config.seed": 7})
    refused = resume(harness, interrupted)
    assert refused.returncode == ExitCode.WRONG_INPUT
    output = [line.strip() for line in refused.console.splitlines()]
    assert "optimizer.learning_rate: 0.002 before, 0.5 now" in output, refused.console
    assert "schedule.seed: 42 before, 7 now" in output
    assert any("--allow-changed-inputs" in line for line in output)
    assert "Traceback" not in refused.console
    assert interrupted.files() == before, "nothing was touched"
    # The same steps as --allow-changed-inputs, with processes from the fork server.
    changed = resume_run(harness, interrupted.run, make_request(interrupted.manifest), allow_changed_inputs=True)
    assert fork_server.launch(changed.make_command("--allow-changed-inputs")).returncode == 0
    assert changed.trained.outcome.attempts[-1].from_step == SAVED
    assert changed.trained.outcome.status == "done"


@pytest.mark.slow
def test_edited_rows_are_refused_by_the_training(
    harness: Harness, fork_server: ForkServer, interrupted: InterruptedRun
) -> None:
    lines = interrupted.rows.read_text().splitlines()
    edited = lines[4].replace("a", "o")
    assert edited != lines[4]
    rows = load_recorded_values(interrupted.run.paths)
    interrupted.rows.write_text("\n".join([*lines[:4], edited, *lines[5:]]) + "\n")
    resumed = resume_run(harness, interrupted.run, make_request(interrupted.manifest))
    refused = fork_server.launch(resumed.command)
    assert refused.returncode != 0
    outcome = resumed.trained.outcome
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.WRONG_INPUT)
    assert "its inputs changed since the last checkpoint\n  data: " in outcome.error
    assert "--allow-changed-inputs" in outcome.error
    assert get_newest_step(interrupted.run.paths) == SAVED
    assert load_recorded_values(interrupted.run.paths) == rows, "nothing is lost"
    assert fork_server.launch(resumed.make_command("--allow-changed-inputs")).returncode == 0
    assert resumed.trained.outcome.attempts[-1].from_step == SAVED


@pytest.mark.slow
def test_edited_rows_are_refused_by_the_command_line(harness: Harness, interrupted: InterruptedRun) -> None:
    lines = interrupted.rows.read_text().splitlines()
    interrupted.rows.write_text("\n".join(lines[1:]) + "\n")
    refused = resume(harness, interrupted)
    assert refused.returncode == ExitCode.WRONG_INPUT, refused.console
    assert "  data: " in refused.console
    assert resume(harness, interrupted, "--allow-changed-inputs").returncode == 0


def make_plain_launch(harness: Harness, script: str, manifest: Path, *flags: str) -> Command:
    """Return the command that a user types, on a free port."""
    config = ("--config_file", "accelerate_configs/ddp_2gpu.yaml", "--main_process_port", "0")
    run = ("--manifest", str(manifest), "--runs-dir", str(harness.runs), *flags)
    return Command(argv=(*ACCELERATE, *config, script, *run), environment={})


@pytest.mark.slow
def test_resume_with_plain_accelerate_launch(harness: Harness, fork_server: ForkServer) -> None:
    manifest = harness.manifest(TrainingCase(strategy="ddp", config=CONFIG))
    full = ("--profile", "full")
    assert (
        fork_server.launch(
            make_plain_launch(harness, TRAIN_SCRIPT, manifest, *full, "--run-id", "uninterrupted")
        ).returncode
        == 0
    )
    assert (
        fork_server.launch(
            make_plain_launch(harness, PHASE_RECORDING_SCRIPT, manifest, *full, "--run-id", "interrupted"), **STOP_SOON
        ).returncode
        != 0
    )
    paths = RunPaths(harness.runs / "interrupted")
    checkpoint, _ = find_newest(paths)
    assert checkpoint is not None
    assert checkpoint.manifest.step == SAVED
    resumed = fork_server.launch(make_plain_launch(harness, TRAIN_SCRIPT, manifest, "--resume", "interrupted"))
    assert resumed.returncode == 0, resumed.console
    assert f"resuming after step {SAVED}" in resumed.console
    check_same(TrainedRun(paths), TrainedRun(RunPaths(harness.runs / "uninterrupted")))
