"""outcome.json: a record that cannot be written must not hide how the run ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher.core.errors import RunFailedError
from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.runs.record import Outcome, load_outcome
from launcher.training.checkpoint.resume import ResumeOptions
from launcher.training.observers import checkpointer
from launcher.training.runtime.run_record import RunRecorder
from launcher.training.tracking.tracker_process import TrackerProcess
from launcher.training.trainer import TrainerInputs, run_training
from tests.training.builders import VOCABULARY, reset_accelerate, vary


def test_an_end_that_cannot_be_written_is_only_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    recorder = RunRecorder(paths, is_main=True)
    paths.outcome.unlink()
    paths.outcome.mkdir()  # as good as a full disk: nothing can be put in its place
    recorder.finish(status="failed", exit_code=4)
    assert "outcome.json cannot be written" in capsys.readouterr().err


def test_the_end_is_final(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    RunRecorder(paths, is_main=True).finish(status="done", exit_code=0)
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    assert outcome.is_final
    assert outcome.ended_at is not None


def test_only_the_first_end_of_a_run_is_recorded(tmp_path: Path) -> None:
    """A second signal while an upload is waited for."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    recorder = RunRecorder(paths, is_main=True)
    recorder.finish(status="done", exit_code=0)
    recorder.finish(status="stopped", exit_code=75, error="stopped at once")
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    assert (outcome.status, outcome.exit_code, outcome.error) == ("done", 0, "")


def test_spent_time_is_kept_when_its_rows_are_dropped(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    assert RunRecorder(paths, is_main=True).add_spent_seconds(0.0) == 0.0
    assert RunRecorder(paths, is_main=True).add_spent_seconds(1040.0) == 1040.0  # then dies, after dropping the rows
    assert RunRecorder(paths, is_main=True).add_spent_seconds(540.0) == 1040.0
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    assert [attempt.spent_seconds for attempt in outcome.attempts] == [0.0, 1040.0, 1040.0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_waiting_for_an_upload_and_nothing_else(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), number)).start()
        began = time.monotonic()
        TrackerProcess(process, "W&B", 30.0, "again").finish()
        assert time.monotonic() - began < 25
    finally:
        process.kill()
        process.wait()
    assert "W&B: upload not finished yet; " in capsys.readouterr().err
    assert signal.getsignal(number) == before


def test_a_killed_uploader_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    TrackerProcess(process, "W&B", 30.0, "again").finish()
    console = capsys.readouterr().err
    assert console == "W&B: upload incomplete (exit code -9); complete it with: again\n"


def train_recorded(plan: Plan, store: Store, paths: RunPaths) -> Outcome:
    paths.root.mkdir(exist_ok=True)
    paths.plan.write_text(plan.model_dump_json())
    reset_accelerate()
    inputs = TrainerInputs(
        plan=plan, paths=paths, store=store, folders=(), vocab_size=VOCABULARY, options=ResumeOptions()
    )
    recorder = RunRecorder(paths, is_main=True)
    try:
        run_training(inputs, recorder)
        recorder.finish(status="done", exit_code=0)
    except RunFailedError as error:
        recorder.finish(status="failed", exit_code=4, error=str(error))
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("is_metrics_lost", [False, True])
def test_the_outcome_says_what_was_trained_if_the_adapter_cannot_be_written(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_metrics_lost: bool
) -> None:
    """All steps are trained and saved, then the disk is full; the resume has no step left to train."""

    def fill(*_arguments: object) -> None:
        raise RunFailedError("adapter cannot be written: No space left on device")

    varied = vary(plan, {"schedule.max_steps": 3, "schedule.save_every_steps": 1})
    paths = RunPaths(tmp_path / "run")
    with monkeypatch.context() as full:
        full.setattr(checkpointer, "save_weights", fill)
        failed = train_recorded(varied, store, paths)
    assert failed.status == "failed"
    assert (failed.steps_done, failed.attempts[-1].steps_done, failed.num_steps) == (3, 3, 3)
    assert failed.final_loss is not None
    if is_metrics_lost:
        paths.metrics.unlink()
    resumed = train_recorded(varied, store, paths)
    assert (resumed.status, resumed.attempts[-1].from_step) == ("done", 3)
    assert (resumed.steps_done, resumed.final_loss) == (3, failed.final_loss)


def test_a_resume_that_fails_early_keeps_what_was_trained(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    varied = vary(plan, {"schedule.max_steps": 3, "schedule.save_every_steps": 1})
    paths = RunPaths(tmp_path / "run")
    trained = train_recorded(varied, store, paths)
    monkeypatch.setattr("launcher.training.trainer.build_run", lambda *_: (_ for _ in ()).throw(RunFailedError("no")))
    failed = train_recorded(varied, store, paths)
    assert (failed.status, failed.steps_done, failed.final_loss) == ("failed", 3, trained.final_loss)
