"""A real sweep on a CPU: killed in a trial, continued by the same command, and the trial resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from launcher.core.metrics import TRAIN_LOSS, load_metrics
from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome
from tests.conftest import ROOT
from tests.training.trained_run import Trained, launcher

pytest.importorskip("optuna", reason="pip install 'expert-launcher[sweep]'")

NUM_STEPS = 6
SETTINGS = {
    "evaluation.task_rows": 0,
    "training.config.batch_size": 2,
    "training.config.gradient_accumulation_steps": 1,
    "training.config.evaluation_strategy": "steps",
    "training.config.eval_steps": 2,
    "training.config.save_strategy": "steps",
    "training.config.save_steps": 1,
}


def write_expert(folder: Path) -> Path:
    """Write an expert with a few rows, so that evaluations take a moment only."""
    source = ROOT / "experts/json"
    (folder / "sample").mkdir(parents=True)
    for split, count in (("train", 40), ("validation", 4), ("test", 4)):
        with (source / f"sample/{split}.jsonl").open() as rows:
            (folder / f"sample/{split}.jsonl").write_text("".join(islice(rows, count)))
    shutil.copyfile(source / "manifest.json", folder / "manifest.json")
    return folder / "manifest.json"


@pytest.mark.slow
def test_a_killed_sweep_continues_with_its_trial(tmp_path: Path) -> None:
    scratch = Trained(runs_dir=tmp_path / "runs", data_dir=tmp_path / "data", base=tmp_path / "base")
    shared = [str(write_expert(tmp_path / "tiny")), "--max-steps", str(NUM_STEPS), "--wandb", "disabled"]
    shared += [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    words = ["sweep", *shared]
    words += [
        "--param",
        "learning_rate=1e-4..1e-2:log",
        "--param",
        "rank=4,8",
        "--trials",
        "2",
        "--name",
        "s",
        "--json",
    ]
    command = [sys.executable, "-m", "launcher", *words, "--runs-dir", str(scratch.runs_dir)]
    first = RunPaths(scratch.runs_dir / "s-000")
    process = subprocess.Popen(command, cwd=ROOT, env=scratch.environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 600
        while count_steps(first) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    result = launcher(scratch, *words)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert [trial["status"] for trial in content["trials"]] == ["done", "done"]
    assert content["best"] in ("s-000", "s-001")
    outcome = load_outcome(first.outcome)
    assert outcome is not None
    assert (len(outcome.attempts), outcome.attempts[1].from_step > 0) == (2, True)
    # The resumed trial has the bytes of a run that was not interrupted.
    sets = [word for key, value in content["trials"][0]["parameters"].items() for word in ("--set", f"{key}={value}")]
    again = launcher(scratch, "train", *shared, *sets, "--run-id", "again")
    assert again.returncode == 0, again.stderr
    (one,), (other,) = (
        list((scratch.runs_dir / name / "adapter").glob("*.safetensors")) for name in ("s-000", "again")
    )
    assert one.read_bytes() == other.read_bytes()
    page = scratch.runs_dir / "s/compare.html"
    assert all(name in page.read_text() for name in ("s-000", "s-001"))


def count_steps(paths: RunPaths) -> int:
    return sum(TRAIN_LOSS in row.values for row in load_metrics(paths.metrics)) if paths.metrics.is_file() else 0
