"""outcome.json: a record that cannot be written must not hide how the run ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.paths import RunPaths
from launcher.record import load_outcome
from launcher.training.chronicle import Chronicle


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
