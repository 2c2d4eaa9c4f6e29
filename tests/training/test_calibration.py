"""A finished training on the tiny base calibrates the next plan."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from launcher.core import metrics
from launcher.core.run_paths import RunPaths
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.runs.calibration_store import CalibrationFile
from launcher.runs.record import load_record
from launcher.training.monitoring.meters import MemoryMeter, StepStats
from tests.conftest import ROOT, python_path
from tests.forked_python import run_python
from tests.training.builders import build

STEPS = 9


def call(file: Path, *words: str, value: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "LAUNCHER_DATA_DIR": str(file.parent / "data"),
        "LAUNCHER_CALIBRATION": value or str(file),
    }
    return run_python([*words], cwd=ROOT, env=environment, needs_torch=True)


def ask(file: Path, *words: str, value: str | None = None) -> Plan:
    result = call(file, "-m", "launcher", "plan", "neo4j", "--json", *words, value=value)
    assert result.returncode == 0, result.stderr
    return Plan.model_validate_json(result.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunPaths, str]:
    """Return the calibration file, the run, and the console output."""
    folder = tmp_path_factory.mktemp("calibrating")
    file, runs = folder / "calibration.json", folder / "runs"
    options = ["--max-steps", str(STEPS), "--runs-dir", str(runs), "--run-id", "a", "--set", "evaluation.task_rows=0"]
    result = call(file, str(ROOT / "launcher/train.py"), "--manifest", "experts/neo4j/manifest.json", *options)
    assert result.returncode == 0, result.stderr
    return file, RunPaths(runs / "a"), result.stderr


@pytest.mark.slow
def test_a_finished_run_is_stored(trained: tuple[Path, RunPaths, str]) -> None:
    file, paths, said = trained
    (entry,) = CalibrationFile.model_validate_json(file.read_text()).entries
    rates = [row.values[metrics.TOKENS_PER_SECOND] for row in load_record(paths).steps]
    assert len(rates) == STEPS
    assert min(rates) <= entry.seen.measured_tokens_per_second <= max(rates)
    assert (entry.machine.gpu, entry.machine.software["torch"]) == (None, version("torch"))
    assert (entry.seen.run, entry.seen.measured_bytes, entry.seen.estimated_tokens_per_second) == ("a", None, None)
    assert f"tokens/s, stored for later plans in {file}" in said


@pytest.mark.slow
def test_the_next_plan_uses_it(trained: tuple[Path, RunPaths, str]) -> None:
    file, _, _ = trained
    (entry,) = CalibrationFile.model_validate_json(file.read_text()).entries
    planned = ask(file, "--ram", "16")  # what is free changes from call to call
    assert planned.speed.tokens_per_second == pytest.approx(entry.seen.measured_tokens_per_second)
    (decision,) = (one for one in planned.decisions if one.name == "speed estimate")
    assert decision.value.endswith("tokens/s by 1 run on this machine")
    assert ask(file, "--ram", "16") == planned, "the same file, the same plan"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["flag", "off", "another machine"])
def test_without_it_there_is_no_estimate_on_a_cpu(trained: tuple[Path, RunPaths, str], way: str) -> None:
    file, _, _ = trained
    words = {"flag": ["--no-calibration"], "off": [], "another machine": ["--gpu", "rtx4090"]}[way]
    planned = ask(file, *words, value="off" if way == "off" else None)
    assert not any(one.name in ("speed estimate", "memory estimate") for one in planned.decisions)
    assert (planned.speed.tokens_per_second is None) == (way != "another machine")


@pytest.mark.slow
def test_an_invalid_file_is_ignored(trained: tuple[Path, RunPaths, str], tmp_path: Path) -> None:
    file, _, _ = trained
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"entries": 7}))
    result = call(file, "-m", "launcher", "plan", "neo4j", "--json", value=str(bad))
    assert result.returncode == 0
    assert f"warning: {bad} cannot be read (1 problems)" in result.stderr
    assert Plan.model_validate_json(result.stdout).speed.tokens_per_second is None


# ---------------------------------------------------------------------------------- what the memory is measured against


class Counters:
    """Fakes the memory counters of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = self.now = 10 << 30
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: self.read())
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: self.now)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: self.reset())

    def use(self, gib: float) -> None:
        self.peak = max(self.peak, int(gib * 2**30))

    def read(self) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.peak, "reserved_bytes.all.peak": self.peak + 1}

    def reset(self) -> None:
        self.peak = self.now


def test_evaluations_do_not_count_towards_the_prediction_error(
    plan: Plan, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, use = Counters(monkeypatch), MemoryMeter(build(plan, store, tmp_path))
    use._device = torch.device("cuda")
    use._predicted = 20.0
    done = StepStats(step=1, packs=[0], num_tokens=1, seconds=1.0, starved_seconds=0.0, is_skipped=False)

    def step(gib: float) -> dict[str, float]:
        counters.use(gib)
        values = use.read(done)
        use.read_totals()  # as the loop reads every step
        return values

    assert step(16.0)[metrics.PREDICTION_ERROR] == pytest.approx(20 / 16 - 1)
    counters.use(40.0)  # an evaluation
    use.read_totals()
    values = step(18.0)
    assert values[metrics.PREDICTION_ERROR] == pytest.approx(20 / 18 - 1)
    assert values[metrics.PEAK_ALLOCATED_GIB] == pytest.approx(40.0), "the peak of the run is still reported"
    counters.use(30.0)
    use.read_totals()
    assert step(11.0)[metrics.PREDICTION_ERROR] == pytest.approx(20 / 18 - 1), "the highest of all steps"
