"""--profile-steps: a trace of some steps of a real training, and nothing else changes."""

from __future__ import annotations

import gzip
import json

import pytest

from launcher.paths import RunPaths
from tests.conftest import ROOT
from tests.training.trained_run import Trained, run_python, trained  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def traced(trained: Trained) -> RunPaths:  # noqa: F811
    """The training of the other run, traced."""
    words = [str(ROOT / "launcher/train.py"), "--manifest", str(ROOT / "experts/neo4j/manifest.json")]
    words += ["--max-steps", "3", "--runs-dir", str(trained.runs_dir), "--run-id", "traced"]
    result = run_python([*words, "--set", "evaluation.task_rows=0", "--profile-steps", "2:3"], trained)
    assert result.returncode == 0, result.stderr
    assert "traced steps 2 to 3: There is no GPU" in result.stderr
    return RunPaths(trained.runs_dir / "traced")


def test_the_trace_can_be_opened_and_holds_those_steps(traced: RunPaths) -> None:
    with gzip.open(traced.profile / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    summary = (traced.profile / "summary.md").read_text()
    assert "# Steps 2 to 3" in summary
    assert "| `matrix products` |" in summary
    assert "| `aten::" in summary


def test_what_is_trained_is_the_same(trained: Trained, traced: RunPaths) -> None:  # noqa: F811
    name = "adapter_model.safetensors"
    assert (traced.adapter / name).read_bytes() == (trained.paths.adapter / name).read_bytes()


@pytest.mark.parametrize(
    ("steps", "words"),
    [("5", "is not A:B"), ("7:5", "step 7 comes after step 5"), ("1:900", "cannot be opened"), ("0:3", "above 0")],
)
def test_what_makes_no_sense_is_refused(trained: Trained, steps: str, words: str) -> None:  # noqa: F811
    script = [str(ROOT / "launcher/train.py"), "--manifest", str(ROOT / "experts/neo4j/manifest.json")]
    result = run_python([*script, "--profile-steps", steps], trained)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
