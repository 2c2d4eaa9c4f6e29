"""--profile-steps: a trace of some steps of a real training, and nothing else changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.model import Plan, ProfilePlan
from launcher.training.checkpoint.resume import ResumeOptions
from launcher.training.runtime.run_record import RunRecorder
from launcher.training.trainer import TrainerInputs, run_training
from tests.training.builders import VOCABULARY, vary


def train(plan: Plan, store: Store, root: Path, profiled: ProfilePlan | None) -> RunPaths:
    root.mkdir()
    paths = RunPaths(root)
    plan = vary(plan, {"schedule.max_steps": 3, "profile_steps": profiled})
    task = TrainerInputs(
        plan=plan, paths=paths, store=store, folders=(), vocab_size=VOCABULARY, options=ResumeOptions()
    )
    run_training(task, RunRecorder(paths, is_main=True))
    return paths


def test_the_trace_contains_the_requested_steps(
    plan: Plan, store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    traced = train(plan, store, tmp_path / "traced", ProfilePlan(first_step=2, last_step=3))
    assert "traced steps 2 to 3: No GPU" in capfd.readouterr().err
    with gzip.open(traced.profile / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    summary = (traced.profile / "summary.md").read_text()
    assert "# Steps 2 to 3" in summary
    assert "| `matmuls` |" in summary
    assert "| `aten::" in summary
    alone = train(plan, store, tmp_path / "alone", None)
    assert not alone.profile.exists()
    name = "adapter_model.safetensors"
    assert (traced.adapter / name).read_bytes() == (alone.adapter / name).read_bytes()


def test_steps_beyond_the_end_are_reported(
    plan: Plan, store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = train(plan, store, tmp_path / "late", ProfilePlan(first_step=9, last_step=12))
    assert "nothing was traced: --profile-steps starts at step 9" in capfd.readouterr().err
    assert not paths.profile.exists()


@pytest.mark.parametrize(
    ("steps", "words"),
    [("5", "is not A:B"), ("7:5", "step 7 comes after step 5"), ("1:900", "too large to open"), ("0:3", "at least 1")],
)
def test_invalid_ranges_are_refused(capsys: pytest.CaptureFixture[str], steps: str, words: str) -> None:
    assert main(["train", "neo4j", "--profile-steps", steps]) == 2
    assert words in capsys.readouterr().err
