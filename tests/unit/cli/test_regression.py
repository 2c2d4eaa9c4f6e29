"""`launcher regression`: output and exit code for two runs on disk, and errors of a training that fails."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launcher.bench.regression import Pair, plan_pair, train
from launcher.bench.worker import ChildFailedError
from launcher.cli.regression import compare
from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.request.request import Request
from tests.conftest import ROOT, WriteManifest, python_path
from tests.forked_python import run_python
from tests.made_runs import MadeRun, write_run
from tests.unit.bench.synthetic_audit import make_audit
from tests.unit.bench.test_regression_verdict import make_result, make_rows

pytestmark = pytest.mark.long


@pytest.fixture
def pair() -> Pair:
    return plan_pair(Request(expert="json"), lambda _planned: make_audit())


def write_side(folder: Path, name: str, seconds: float, right: int) -> RunPaths:
    paths = write_run(folder, MadeRun(run_id=name, expert="json", gpu=None), make_rows(26, seconds, (0.25,)))
    paths.evaluation.write_text(make_result(right).model_dump_json(), encoding="utf-8")
    return paths


def test_faster_run_of_equal_quality_passes(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal breaks lines
    old, new = write_side(tmp_path, "x-old", 2.0, 90), write_side(tmp_path, "x-new", 1.0, 90)
    assert compare(pair, old, new, max_regression=0.05, is_json=False, notes=["a busy machine"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split("  ")[0].strip(): " ".join(line.split("  ")[1:]).split() for line in lines}
    assert shown["rows trained"] == ["78", "78"]
    assert shown["validation loss, final"] == ["0.2500", "0.2500"]
    assert shown["eval/equal"] == ["90.0", "%", "(82.6", "to", "94.5)", "tie"] * 2
    assert "note: a busy machine" in lines
    assert any(
        line.startswith("quality gate passed: not worse by more than 5.0 %: 0 of 100 rows newly wrong")
        for line in lines
    )
    assert "speed: 2.00 times as many rows per second" in lines
    assert lines[-1] == f"launcher compare x-old x-new --runs-dir {tmp_path}"


def test_worse_is_exit_code_6(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write_side(tmp_path, "x-old", 1.0, 90), write_side(tmp_path, "x-new", 1.5, 70)
    assert compare(pair, old, new, max_regression=0.05, is_json=False) == ExitCode.QUALITY_GATE
    shown = capsys.readouterr().out
    assert (
        "quality gate FAILED: worse by more than 5.0 %: 20 of 100 rows newly wrong, 0 newly right: -20.0 points"
        in shown
    )
    assert "speed: not faster here: 0.67 times as many rows per second" in shown
    assert compare(pair, old, new, max_regression=0.2, is_json=False) == ExitCode.DONE


def test_json_output_has_the_same_results(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write_side(tmp_path, "x-old", 2.0, 90), write_side(tmp_path, "x-new", 1.0, 70)
    assert compare(pair, old, new, max_regression=0.05, is_json=True) == ExitCode.QUALITY_GATE
    summary = json.loads(capsys.readouterr().out)
    assert (summary["speedup"], summary["gate"]["is_open"], summary["num_asked"]) == (2.0, False, 100)
    assert summary["runs"] == {"old": str(old.root), "new": str(new.root)}
    packing = next(setting for setting in summary["settings"] if setting["name"] == "rows")
    assert packing["override"] == "training.config.packing=false"
    assert summary["rows"] == [78.0, 78.0]


@pytest.mark.parametrize(("code", "ours"), [(2, 2), (3, 3), (4, 4), (5, 5), (75, 75), (137, 4), (9, 4)])
def test_exit_code_of_a_failed_training_is_mapped(code: int, ours: int) -> None:
    assert int(ChildFailedError("it failed", (), code).exit_code) == ours


def run_verb(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "LAUNCHER_DATA_DIR": str(tmp_path / "data")}
    return run_python(["-m", "launcher", "regression", *arguments], cwd=ROOT, env=environment)


@pytest.mark.process
def test_exit_code_of_a_training_that_cannot_start_is_returned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ChildFailedError, match=r"training json-old failed \(exit code 2\)"):
        train(Request(expert="json"), RunPaths(tmp_path / "file/runs/json-old"))
    assert "is not a folder" in capfd.readouterr().err  # by the training itself


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jsn",), "no expert called 'jsn'; did you mean json?"),
        (("json", "--max-regression", "lots"), "'lots' is not a percentage, such as 5%"),
        (("json", "--set", "training.config.bacth_size=2"), "did you mean batch_size?"),
        (("json", "--rows", "0"), "'0' is not an integer of at least 1"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = run_verb(*arguments, tmp_path=tmp_path)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.process
def test_missing_judge_is_refused_before_training(tmp_path: Path, write_manifest: WriteManifest) -> None:
    path = write_manifest({"name": "expert-poems"}, drop=("training.decoding",))
    result = run_verb(str(path), tmp_path=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: expert-poems: no judge for this expert's answers\n")
