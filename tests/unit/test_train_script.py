"""`launcher/train.py`, as accelerate starts it: with its own folder first on sys.path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launcher.errors import ExitCode
from tests.conftest import ROOT, WriteManifest


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launcher/train.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_it_says_that_nothing_was_trained() -> None:
    result = train("--manifest", "experts/neo4j/manifest.json")
    assert result.returncode == ExitCode.RUN_FAILED
    assert "Nothing was trained" in result.stderr


def test_a_wrong_manifest_is_told_first(write_manifest: WriteManifest) -> None:
    result = train("--manifest", str(write_manifest({"training.config.rank": 0})))
    assert result.returncode == ExitCode.WRONG_INPUT
    assert "training.config.rank: must be at least 1, not 0" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_of_a_dry_run_is_read_back(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher", "train", "neo4j", "--gpu", "h100", "--dry-run"]
    subprocess.run([*command, "--runs-dir", str(tmp_path), "--run-id", "a"], cwd=ROOT, capture_output=True, check=True)
    assert train("--plan", str(tmp_path / "a/plan.json")).returncode == ExitCode.RUN_FAILED
    (tmp_path / "a/plan.json").write_text('{"schema_version": 1}')
    broken = train("--plan", str(tmp_path / "a/plan.json"))
    assert broken.returncode == ExitCode.WRONG_INPUT
    assert "not a plan of this version" in broken.stderr
    (tmp_path / "a/plan.json").write_bytes(b"\xff")
    assert "it is not UTF-8" in train("--plan", str(tmp_path / "a/plan.json")).stderr
    assert train("--plan", str(tmp_path / "none.json")).returncode == ExitCode.WRONG_INPUT
