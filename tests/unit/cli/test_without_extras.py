"""Every command in an installation with the base dependencies only, as after `pip install` of the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from launcher.cli.main import VERBS
from tests.conftest import ROOT
from tests.made_runs import MadeRun, write_run

pytestmark = pytest.mark.process

# Commands of each verb -> the extra that the error names; empty: the command works without one.
COMMANDS = {
    "new shop --data rows.jsonl": "data",
    "validate json": "",
    "plan json": "",
    "prepare json": "data",
    "data": "data",
    "train json": "train",
    "train json --dry-run": "",
    "sweep json --param learning_rate=1e-5,1e-4": "train,sweep",
    "rehearse json --gpu h100 --gpus 2": "train",
    "ask a question": "train",
    "eval json --base": "train",
    "regression json": "train",
    "export a": "train",
    "bench json --vary packing=true,false": "train",
    "bench ablation json": "train",
    "doctor --quick": "",
    "report a": "",
    "dashboard --offline": "",
    "compare a": "",
    "schema": "",
    "completion bash": "",
}


def list_base_packages(name: str = "expert-launcher") -> set[Path]:
    """Return the files and folders that a package and its dependencies without extras install."""
    found = set()
    for required in distribution(name).requires or ():
        if "extra ==" in required:
            continue
        package = distribution(re.split(r"[^\w.-]", required)[0])
        tops = {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}
        found |= {Path(str(package.locate_file(top))) for top in tops} | list_base_packages(package.name)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working folder with rows, a run, and the base packages in site/."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "site").mkdir()
    for path in list_base_packages():
        (folder / "site" / path.name).symlink_to(path)
    shutil.copy(ROOT / "experts/sql/sample/test.jsonl", folder / "rows.jsonl")
    write_run(folder / "runs", MadeRun(run_id="a"))
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without site-packages: -S, which child processes do not inherit."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'site'}"}
    command = [sys.executable, "-S", "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_verb_is_run() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(VERBS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_extra_that_a_command_needs_is_named(command: str, folder: Path) -> None:
    result = run(folder, "launcher", *command.split())
    assert "Traceback" not in result.stderr
    if extra := COMMANDS[command]:
        assert (result.returncode, result.stdout) == (2, "")
        assert "packages that are not installed: " in result.stderr
        assert f"hint: pip install 'expert-launcher[{extra}]'" in result.stderr
    elif command.startswith("dashboard"):
        assert "pip install wandb-workspaces" in result.stderr
    else:
        assert result.returncode == 0, result.stderr


def test_doctor_says_that_an_expert_cannot_be_trained(folder: Path) -> None:
    result = run(folder, "launcher", "doctor", "json", "--quick")
    assert result.returncode == 7
    assert "not installed: accelerate, jinja2, numpy" in " ".join(result.stdout.split())


def test_the_training_script_names_the_extra(folder: Path) -> None:
    assert run(folder, "launcher.train", "--help").returncode == 0
    result = run(folder, "launcher.train", "--manifest", "json")
    assert result.returncode == 2
    assert "hint: pip install 'expert-launcher[train]'" in result.stderr
    assert "Traceback" not in result.stderr
