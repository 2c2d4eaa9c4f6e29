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

from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome
from launcher.training.runtime.run_record import RunRecorder
from launcher.training.tracking.wandb_process import WandbProcess


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
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), number)).start()
        began = time.monotonic()
        WandbProcess(process, tmp_path, 30.0, is_main=True).finish()
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.wait()
    assert "W&B: upload incomplete; " in capsys.readouterr().err
    assert signal.getsignal(number) == before


def test_a_teller_that_was_killed_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    WandbProcess(process, tmp_path / "run", 30.0, is_main=True).finish()
    console = capsys.readouterr().err
    assert (
        f"W&B: upload incomplete (exit code -9); complete it with: {Path(sys.executable).name} -m launcher" in console
    )
    assert console.strip().endswith(f"wandb_uploader {tmp_path / 'run'}")
