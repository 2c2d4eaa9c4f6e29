"""`launcher regression` end to end: two trainings, two evaluations, and a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.core.run_paths import RunPaths
from launcher.judges.results import load_result
from launcher.runs.record import load_record
from tests.conftest import ROOT, python_path

pytest.importorskip("jsonschema_rs", reason="pip install 'expert-launcher[quality]'")
SMALL = ("--set", "training.config.batch_size=2", "--set", "training.config.gradient_accumulation_steps=1")
_TIMEOUT_SECONDS = 300


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "LAUNCHER_DATA_DIR": str(tmp_path / "data"),
    }
    command = [sys.executable, "-m", "launcher", "regression", "json", *SMALL, *arguments]
    command += ["--runs-dir", str(tmp_path / "runs")]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_both_runs_are_trained_evaluated_and_compared(tmp_path: Path) -> None:
    process = start(tmp_path, "--max-steps", "3", "--rows", "4", "--max-new-tokens", "8", "--json")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    result = json.loads(output)
    old, new = (RunPaths(Path(result["runs"][side])) for side in ("old", "new"))
    assert new.run_id.removesuffix("-new") == old.run_id.removesuffix("-old")
    records = load_record(old), load_record(new)
    assert [record.plan.batch.packed for record in records] == [False, True]
    assert [record.plan.checkpointing for record in records] == ["full", "none"]
    assert records[0].plan.schedule.seed == records[1].plan.schedule.seed
    assert [len(record.steps) for record in records] == [3, 3]
    assert records[0].outcome is not None
    assert records[0].outcome.observed["optimizer"] == "torch AdamW"  # in the live process, not as configured
    rows = result["rows"]
    assert rows[0] == 3 * records[0].plan.batch.global_batch_size
    assert rows[1] == pytest.approx(rows[0], rel=0.4)  # of six packs
    assert {"tokens_per_second", "eval_loss_final"} <= {figure["key"] for figure in result["figures"]}
    assert result["speedup"] > 0
    results = load_result(old.evaluation), load_result(new.evaluation)
    assert [answer.key for answer in results[0].answers] == [answer.key for answer in results[1].answers]
    assert (result["num_asked"], result["gate"]["is_open"]) == (4, True)


@pytest.mark.slow
def test_signal_stops_the_current_training_and_starts_no_other(tmp_path: Path) -> None:
    process = start(tmp_path, "--max-steps", "5000")
    try:
        metrics = wait_for_metrics(tmp_path / "runs", process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 75, errors
    assert errors.rstrip().endswith("error: stopped by SIGTERM: nothing was compared")
    outcome = load_record(RunPaths(metrics.parent)).outcome
    assert outcome is not None
    assert (outcome.status, outcome.exit_code) == ("stopped", 75)
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == [metrics.parent.name]


def wait_for_metrics(runs_dir: Path, process: subprocess.Popen[str]) -> Path:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for file in runs_dir.glob("*/metrics.jsonl"):
            if file.stat().st_size:
                return file
        time.sleep(0.2)
    raise AssertionError("no step was trained")
