"""`launcher doctor` as a user types it: exit codes, words, JSON; without a GPU, and on an H200 by its nvidia-smi."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.doctor.findings import Report
from launcher.metrics import append_metrics
from launcher.record import write_outcome
from tests.conftest import ROOT, python_path
from tests.unit.doctor import nvidia
from tests.unit.doctor.made import make_record, make_steps, plan_for

QUICK_SECONDS = 2.0
CLEAN = ("WANDB_API_KEY", "WANDB_MODE", "CUDA_VISIBLE_DEVICES")


def doctor(*arguments: str, home: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    own = {"NO_COLOR": "1", "COLUMNS": "140", "PYTHONPATH": python_path(), "HOME": str(home)}
    command = [sys.executable, "-m", "launcher", "doctor", *arguments]
    return subprocess.run(
        command, cwd=home, env={**environment, **own, **(env or {})}, capture_output=True, text=True, check=False
    )


def test_a_machine_without_a_gpu_has_nothing_wrong(tmp_path: Path) -> None:
    began = time.monotonic()
    result = doctor("--quick", home=tmp_path)
    took = time.monotonic() - began
    assert (result.returncode, result.stderr) == (0, "")
    assert "note     GPU " in result.stdout
    assert "Nothing is wrong, " in result.stdout
    assert "packages" not in result.stdout
    assert took < QUICK_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) + 1
    assert list(tmp_path.iterdir()) == []


def test_the_whole_look_without_a_gpu(tmp_path: Path) -> None:
    result = doctor("neo4j", "--json", home=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    report = Report.model_validate_json(result.stdout)
    families = {finding.family for finding in report.findings}
    assert families == {"GPU", "machine", "disks", "packages", "W&B", "expert"}
    packages = {one.subject: one.status for one in report.findings if one.family == "packages"}
    assert packages["torch"] == packages["BF16"] == packages["attention: sdpa"] == packages["deepspeed"] == "ok"


def test_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.install_nvidia_smi(tmp_path, monkeypatch)
    home = tmp_path / "home"
    home.mkdir()
    result = doctor("neo4j", "--quick", home=home)
    assert (result.returncode, result.stderr) == (0, "")
    assert "NVIDIA H200, 140.4 GiB" in result.stdout
    assert "570.133.20, CUDA up to 12.8" in result.stdout
    assert "of 139.8 GiB free GPU memory predicted" in result.stdout
    assert "tokens/s (within about 20 %: such runs were measured on this GPU" in result.stdout
    assert "Nothing is wrong, " in result.stdout


def test_an_h200_that_somebody_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.install_nvidia_smi(
        tmp_path,
        monkeypatch,
        main=nvidia.H200.replace("143156", "23156"),
        more="0, 00000000:4F:00.0, 120000, 98, 71, 16, 16, 0\n",
        processes=nvidia.ONE.format(pid=os.getpid()),
    )
    result = doctor("neo4j", "--quick", "--json", home=tmp_path)
    assert (result.returncode, result.stderr) == (7, "")
    report = Report.model_validate_json(result.stdout)
    wrong = {finding.subject: finding for finding in report.findings if finding.status == "problem"}
    assert wrong.keys() == {"memory of GPU 0"}
    assert f"(process {os.getpid()}, 40.0 GiB)" in wrong["memory of GPU 0"].found


def test_a_card_that_is_too_full_for_any_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.install_nvidia_smi(
        tmp_path,
        monkeypatch,
        main=nvidia.H200.replace("143156", "600"),
        more="0, 00000000:4F:00.0, 143000, 98, 71, 16, 16, 0\n",
    )
    result = doctor("neo4j", "--quick", "--json", home=tmp_path)
    assert result.returncode == 7
    subjects = {
        one.subject: one for one in Report.model_validate_json(result.stdout).findings if one.status == "problem"
    }
    assert subjects["plan"].matters == "no plan fits this machine"


def write_made_run(runs: Path, share: float, **outcome: object) -> None:
    plan = plan_for(None)
    record = make_record(
        plan, make_steps(plan, 60, lambda _step: {"time/data_wait_share": share}), root=runs / "made", **outcome
    )
    record.paths.logs.mkdir(parents=True)
    record.paths.plan.write_text(plan.model_dump_json())
    assert record.outcome is not None
    write_outcome(record.paths.outcome, record.outcome)
    for row in record.rows:
        append_metrics(record.paths.metrics, row)


def test_a_run_is_read(tmp_path: Path) -> None:
    write_made_run(tmp_path / "runs", 0.004)
    result = doctor("--run", "made", "--quick", home=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "healthy: 60 steps, " in result.stdout


def test_beside_a_training_nothing_is_tried_out(tmp_path: Path) -> None:
    write_made_run(tmp_path / "runs", 0.004, status="running", num_steps=1000)
    with (tmp_path / "runs/made/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = doctor("--run", "made", "--json", home=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    report = Report.model_validate_json(result.stdout)
    (packages,) = (one for one in report.findings if one.family == "packages")
    assert packages.found == "could not look: this run trains, and a micro-test beside it would slow it down"
    assert next(one.found for one in report.findings if one.subject == "status").startswith(
        "running, 60 of 1,000 steps"
    )


def test_a_run_with_a_problem_is_told_with_the_next_step(tmp_path: Path) -> None:
    write_made_run(tmp_path / "runs", 0.4)
    result = doctor("--run", "made", "--quick", home=tmp_path)
    assert (result.returncode, result.stderr) == (7, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "run"
    assert lines[1].startswith("  problem  data ")
    assert any(line.strip().startswith("why: the CPU starves the device") for line in lines)
    assert any(line.strip().startswith("next: ") for line in lines)
    assert lines[-1].startswith("1 problem, ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-expert",), "no-such-expert"),
        (("--run", "no-such-run"), "no run called 'no-such-run'"),
        (("neo4j", "--set", "training.config.rank=0"), "training.config.rank"),
    ],
)
def test_wrong_input_is_exit_code_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = doctor(*arguments, "--quick", home=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    told = doctor(*arguments, "--quick", "--json", home=tmp_path)
    assert words in json.dumps(json.loads(told.stdout))


def test_no_key_is_ever_printed(tmp_path: Path) -> None:
    key = "feedfacefeedfacefeedfacefeedfacefeedface"
    env = {"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    result = doctor("--quick", "--json", home=tmp_path, env=env)
    assert result.returncode == 7
    assert "a key in WANDB_API_KEY, but 127.0.0.1 cannot be reached" in result.stdout
    assert key not in result.stdout + result.stderr


def test_where_only_planning_is_installed(tmp_path: Path) -> None:
    for name in ("numpy", "pyarrow", "tokenizers", "torch"):
        (tmp_path / name).mkdir()
        missing = f"raise ModuleNotFoundError('No module named {name}', name={name!r})"
        (tmp_path / name / "__init__.py").write_text(missing)
    home = tmp_path / "home"
    home.mkdir()
    path = f"{tmp_path}{os.pathsep}{python_path()}"
    result = doctor("neo4j", "--json", home=home, env={"PYTHONPATH": path})
    assert (result.returncode, result.stderr) == (0, "")
    report = Report.model_validate_json(result.stdout)
    torch = next(one for one in report.findings if one.subject == "torch")
    assert (torch.status, torch.found) == ("note", "torch is not installed")
    assert "prepared data" not in {one.subject for one in report.findings}


def test_it_is_one_of_the_verbs() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "launcher", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "\n    doctor " in text
    assert "7 doctor found something wrong" in text
