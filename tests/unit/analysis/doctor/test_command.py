"""`launcher doctor` on the command line: exit codes, text and JSON, without a GPU and with a fake H200."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.analysis.doctor.findings import Report
from launcher.core.metrics import append_metrics
from launcher.runs.record import write_outcome
from tests.conftest import ROOT, python_path
from tests.fake_nvml import MIB, FakeGpu, FakeNvml, write_nvml
from tests.forked_python import run_python
from tests.unit.analysis.doctor.builders import make_record, make_steps, plan_for

pytestmark = pytest.mark.process

CLEAN = ("WANDB_API_KEY", "WANDB_MODE", "CUDA_VISIBLE_DEVICES")


def doctor(*arguments: str, home: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    own = {"NO_COLOR": "1", "COLUMNS": "140", "PYTHONPATH": python_path(), "HOME": str(home)}
    return run_python(["-m", "launcher", "doctor", *arguments], cwd=home, env={**environment, **own, **(env or {})})


def test_machine_without_gpu_has_no_problems(tmp_path: Path) -> None:
    result = doctor("--quick", home=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "note     GPU " in result.stdout
    assert "No problems found, " in result.stdout
    assert "packages" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def find_problems(report: Report) -> set[str]:
    """Return the subjects of all problems except slow disks: the other tests write at the same time."""
    return {one.subject for one in report.findings if one.status == "problem" and one.family != "disks"}


def test_all_families_are_checked_without_gpu(tmp_path: Path) -> None:
    result = doctor("neo4j", "--json", home=tmp_path)
    assert result.stderr == ""
    report = Report.model_validate_json(result.stdout)
    assert find_problems(report) == set()
    families = {finding.family for finding in report.findings}
    assert families == {"GPU", "machine", "disks", "packages", "W&B", "expert"}
    packages = {one.subject: one.status for one in report.findings if one.family == "packages"}
    assert packages["torch"] == packages["BF16"] == packages["attention: sdpa"] == packages["deepspeed"] == "ok"


def with_gpu(folder: Path, gpu: FakeGpu) -> dict[str, str]:
    return {"PYTHONPATH": write_nvml(folder / "nvml", FakeNvml(gpus=[gpu]))}


def test_free_h200_has_no_problems(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    result = doctor("neo4j", "--quick", home=home, env=with_gpu(tmp_path, FakeGpu()))
    assert (result.returncode, result.stderr) == (0, "")
    assert "NVIDIA H200, 140.4 GiB" in result.stdout
    assert "570.133.20, CUDA up to 12.8" in result.stdout
    assert "of 139.8 GiB free GPU memory, " in result.stdout
    assert "tokens/s (within about 20 %: similar runs were measured on this GPU" in result.stdout
    assert "No problems found, " in result.stdout


def test_gpu_memory_in_use_is_a_problem(tmp_path: Path) -> None:
    processes: dict[int, int | None] = {os.getpid(): 40960 * MIB}
    gpu = FakeGpu(free_mib=23156, used_mib=120000, utilization=98, processes=processes)
    result = doctor("neo4j", "--quick", "--json", home=tmp_path, env=with_gpu(tmp_path, gpu))
    assert (result.returncode, result.stderr) == (7, "")
    report = Report.model_validate_json(result.stdout)
    wrong = {finding.subject: finding for finding in report.findings if finding.status == "problem"}
    assert wrong.keys() == {"memory of GPU 0"}
    assert f"(process {os.getpid()}, 40.0 GiB)" in wrong["memory of GPU 0"].found


def test_gpu_too_full_for_any_plan_is_a_problem(tmp_path: Path) -> None:
    gpu = FakeGpu(free_mib=600, used_mib=143000, utilization=98)
    result = doctor("neo4j", "--quick", "--json", home=tmp_path, env=with_gpu(tmp_path, gpu))
    assert result.returncode == 7
    subjects = {
        one.subject: one for one in Report.model_validate_json(result.stdout).findings if one.status == "problem"
    }
    assert subjects["plan"].matters == "no plan fits this machine"


def write_run(runs: Path, share: float, **outcome: object) -> None:
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


def test_healthy_run_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 0.004)
    result = doctor("--run", "made", "--quick", home=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "healthy: 60 steps, " in result.stdout


def test_packages_are_not_checked_during_training(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 0.004, status="running", num_steps=1000)
    with (tmp_path / "runs/made/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = doctor("--run", "made", "--json", home=tmp_path)
    assert result.stderr == ""
    report = Report.model_validate_json(result.stdout)
    assert find_problems(report) == set()
    (packages,) = (one for one in report.findings if one.family == "packages")
    assert packages.found == "not checked: this run is training, and a micro-test would slow it down"
    assert next(one.found for one in report.findings if one.subject == "status").startswith(
        "running, 60 of 1,000 steps"
    )


def test_problem_of_run_has_a_next_step(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 0.4)
    result = doctor("--run", "made", "--quick", home=tmp_path)
    assert (result.returncode, result.stderr) == (7, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "run"
    assert lines[1].startswith("  problem  data ")
    assert any(line.strip().startswith("why: the device idles until") for line in lines)
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
def test_invalid_input_exits_with_code_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = doctor(*arguments, "--quick", home=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    as_json = doctor(*arguments, "--quick", "--json", home=tmp_path)
    assert words in json.dumps(json.loads(as_json.stdout))


def test_api_key_is_never_printed(tmp_path: Path) -> None:
    key = "feedfacefeedfacefeedfacefeedfacefeedface"
    env = {"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    result = doctor("--quick", "--json", home=tmp_path, env=env)
    assert result.returncode == 7
    assert "key in WANDB_API_KEY, but 127.0.0.1 cannot be reached" in result.stdout
    assert key not in result.stdout + result.stderr


def test_doctor_works_without_training_packages(tmp_path: Path) -> None:
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


def test_help_lists_doctor() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "launcher", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "\n    doctor " in text
    assert "7 doctor found problems" in text
