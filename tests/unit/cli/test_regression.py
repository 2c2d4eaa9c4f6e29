"""`launcher regression`: what it prints and returns for two runs on disk, and what it says when a training fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.regression import Cost, judge
from launcher.errors import ExitCode
from launcher.inputs import Request
from launcher.paths import RunPaths
from launcher.regression.children import ChildFailedError
from launcher.regression.pair import Pair, plan_pair
from tests.conftest import ROOT, WriteManifest, python_path
from tests.made_runs import MadeRun, write_run
from tests.unit.regression.made_audit import make_audit
from tests.unit.regression.test_verdict import make_result, make_rows


@pytest.fixture
def pair() -> Pair:
    return plan_pair(Request(expert="json"), lambda _planned: make_audit())


def write_side(folder: Path, name: str, seconds: float, right: int) -> RunPaths:
    paths = write_run(folder, MadeRun(run_id=name, expert="json", gpu=None), make_rows(26, seconds, (0.25,)))
    paths.evaluation.write_text(make_result(right).model_dump_json(), encoding="utf-8")
    return paths


def test_as_good_and_faster(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal breaks lines
    old, new = write_side(tmp_path, "x-old", 2.0, 90), write_side(tmp_path, "x-new", 1.0, 90)
    cost = Cost(cpu_seconds=(40.0, 25.0), notes=("a busy machine",))
    assert judge(pair, old, new, max_drop=0.05, is_json=False, cost=cost) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split("  ")[0].strip(): " ".join(line.split("  ")[1:]).split() for line in lines}
    assert shown["rows a second"] == ["13.0", "26.0", "x", "2.00"]
    assert shown["all steps"] == ["12.0", "s", "6.0", "s", "x", "0.50"]
    assert shown["CPU time of the whole run"] == ["40.0", "s", "25.0", "s", "x", "0.62"]
    assert shown["held-out loss"] == ["0.2500", "0.2500"]
    interval = ["90.0", "%", "(82.6", "to", "94.5)"]
    assert shown["equals (main)"] == [*interval, *interval, "+0.0", "points"]
    assert "note: a busy machine" in lines
    assert any(line.startswith("quality gate open: not worse by more than 5.0 %: 0 of 100 rows lost") for line in lines)
    assert "speed: 2.00 times as many rows a second" in lines
    assert lines[-1] == f"launcher compare x-old x-new --runs-dir {tmp_path}"


def test_worse_is_exit_code_6(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write_side(tmp_path, "x-old", 1.0, 90), write_side(tmp_path, "x-new", 1.5, 70)
    assert judge(pair, old, new, max_drop=0.05, is_json=False) == ExitCode.QUALITY_GATE
    shown = capsys.readouterr().out
    assert "quality gate CLOSED: worse by more than 5.0 %: 20 of 100 rows lost, 0 won: -20.0 points" in shown
    assert "speed: not faster here: 0.67 times as many rows a second" in shown
    assert judge(pair, old, new, max_drop=0.2, is_json=False) == ExitCode.DONE


def test_a_program_reads_the_same(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write_side(tmp_path, "x-old", 2.0, 90), write_side(tmp_path, "x-new", 1.0, 70)
    assert judge(pair, old, new, max_drop=0.05, is_json=True) == ExitCode.QUALITY_GATE
    told = json.loads(capsys.readouterr().out)
    assert (told["speedup"], told["gate"]["is_open"], told["num_asked"]) == (2.0, False, 100)
    assert told["runs"] == {"old": str(old.root), "new": str(new.root)}
    packing = next(setting for setting in told["settings"] if setting["name"] == "rows")
    assert packing["set"] == "training.config.packing=false"
    assert [check["name"] for check in told["checks"] if check["is_main"]] == ["equal"]


@pytest.mark.parametrize(("code", "ours"), [(2, 2), (3, 3), (4, 4), (5, 5), (75, 75), (137, 4), (9, 4)])
def test_the_exit_code_of_a_training_is_passed_on(code: int, ours: int) -> None:
    assert int(ChildFailedError("it failed", (), code).exit_code) == ours


def run_verb(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "LAUNCHER_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, "-m", "launcher", "regression", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_training_that_cannot_begin_is_told_with_its_code(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema_rs", reason="pip install 'expert-launcher[quality]'")
    (tmp_path / "file").touch()
    result = run_verb("json", "--max-steps", "2", "--runs-dir", str(tmp_path / "file" / "runs"), tmp_path=tmp_path)
    assert result.returncode == 2
    assert "cannot be made: Not a directory" in result.stderr  # by the training itself
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the training json-")
    assert last.endswith("-regression-old failed (exit code 2)")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jsn",), "no expert called 'jsn'; did you mean json?"),
        (("json", "--max-drop", "lots"), "'lots' is not a share such as 5%"),
        (("json", "--set", "training.config.bacth_size=2"), "did you mean batch_size?"),
        (("json", "--rows", "0"), "'0' is not a whole number above 0"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = run_verb(*arguments, tmp_path=tmp_path)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_nobody_trains_twice_for_a_judge_that_is_not_there(tmp_path: Path, write_manifest: WriteManifest) -> None:
    path = write_manifest({"name": "expert-poems"}, drop=("training.decoding",))
    result = run_verb(str(path), tmp_path=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: expert-poems: nobody here can judge its answers\n")
