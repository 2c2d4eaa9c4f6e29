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

from launcher.paths import RunPaths
from launcher.record import load_outcome
from launcher.training.chronicle import Chronicle
from launcher.training.telling import Teller


def test_an_end_that_cannot_be_written_is_only_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    chronicle = Chronicle(paths, is_main=True)
    paths.outcome.unlink()
    paths.outcome.mkdir()  # as good as a full disk: nothing can be put in its place
    chronicle.end(status="failed", exit_code=4)
    assert "outcome.json cannot be written" in capsys.readouterr().err


def test_the_end_is_final(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    Chronicle(paths, is_main=True).end(status="done", exit_code=0)
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    assert outcome.is_final
    assert outcome.ended_at is not None


def test_what_ended_a_run_is_not_undone_by_what_comes_behind_it(tmp_path: Path) -> None:
    """A second signal while an upload is waited for."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    chronicle = Chronicle(paths, is_main=True)
    chronicle.end(status="done", exit_code=0)
    chronicle.end(status="stopped", exit_code=75, error="stopped at once")
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    assert (outcome.status, outcome.exit_code, outcome.error) == ("done", 0, "")


def test_what_was_spent_is_known_when_the_rows_that_told_it_are_gone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    assert Chronicle(paths, is_main=True).note_spent(0.0) == 0.0
    assert Chronicle(paths, is_main=True).note_spent(1040.0) == 1040.0  # and dies behind this, having cut the rows
    assert Chronicle(paths, is_main=True).note_spent(540.0) == 1040.0
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
        Teller(process, tmp_path, 30.0, is_main=True).finish()
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.wait()
    assert "not all is uploaded yet" in capsys.readouterr().err
    assert signal.getsignal(number) == before


def test_a_teller_that_was_killed_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    Teller(process, tmp_path / "run", 30.0, is_main=True).finish()
    told = capsys.readouterr().err
    assert f"W&B: not all was told (exit code -9); the rest by: {Path(sys.executable).name} -m launcher" in told
    assert told.strip().endswith(f"uplink {tmp_path / 'run'}")
