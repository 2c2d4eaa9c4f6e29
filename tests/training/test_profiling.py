"""--profile-steps: a trace of some steps of a real training, and nothing else changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.corpus.store import Store
from launcher.paths import RunPaths
from launcher.plan.model import Plan, ProfilePlan
from launcher.training.chronicle import Chronicle
from launcher.training.resuming import ResumeOptions
from launcher.training.session import Task, run_training
from tests.training.builders import VOCABULARY, vary


def train(plan: Plan, store: Store, root: Path, profiled: ProfilePlan | None) -> RunPaths:
    root.mkdir()
    paths = RunPaths(root)
    plan = vary(plan, {"schedule.max_steps": 3, "profiled": profiled})
    task = Task(plan=plan, paths=paths, store=store, folders=(), vocab_size=VOCABULARY, options=ResumeOptions())
    run_training(task, Chronicle(paths, is_main=True))
    return paths


def test_the_trace_can_be_opened_and_holds_those_steps(
    plan: Plan, store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    traced = train(plan, store, tmp_path / "traced", ProfilePlan(first_step=2, last_step=3))
    assert "traced steps 2 to 3: There is no GPU" in capfd.readouterr().err
    with gzip.open(traced.profile / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    summary = (traced.profile / "summary.md").read_text()
    assert "# Steps 2 to 3" in summary
    assert "| `matrix products` |" in summary
    assert "| `aten::" in summary
    alone = train(plan, store, tmp_path / "alone", None)
    assert not alone.profile.exists()
    name = "adapter_model.safetensors"
    assert (traced.adapter / name).read_bytes() == (alone.adapter / name).read_bytes()


def test_steps_that_never_come_are_told(
    plan: Plan, store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = train(plan, store, tmp_path / "late", ProfilePlan(first_step=9, last_step=12))
    assert "nothing was traced: --profile-steps begins with step 9" in capfd.readouterr().err
    assert not paths.profile.exists()


@pytest.mark.parametrize(
    ("steps", "words"),
    [("5", "is not A:B"), ("7:5", "step 7 comes after step 5"), ("1:900", "cannot be opened"), ("0:3", "above 0")],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], steps: str, words: str) -> None:
    assert main(["train", "neo4j", "--profile-steps", steps]) == 2
    assert words in capsys.readouterr().err
