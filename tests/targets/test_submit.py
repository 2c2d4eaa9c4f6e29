"""`launcher train --on` with the platform's program: what it is called with, and what is written before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import main
from tests.conftest import ROOT
from tests.targets.jobs import IMAGE, TARGETS

PROGRAMS = {"skypilot": "sky", "dstack": "dstack", "trainjob": "kubectl"}
CALLS = {
    "skypilot": (
        "jobs launch --yes --detach-run --secret HF_TOKEN runs/a/skypilot.yaml",
        "its log: sky jobs logs --name run-a",
    ),
    "dstack": ("apply --yes --detach --file runs/a/train.dstack.yml", "its log: dstack logs run-a"),
    "trainjob": ("apply --filename runs/a/kubernetes.yaml", "its pods: kubectl get pods --selector launcher/run=run-a"),
}
FLAGS = ("--gpu", "h100", "--gpus", "8", "--nodes", "2", "--image", IMAGE, "--secrets", "HF_TOKEN", "--run-id", "a")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty project, with fake programs on the PATH that record how they are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PROGRAMS.values():
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\necho accepted\nexit ${{STATUS:-0}}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.delenv("LAUNCHER_DATA_DIR")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("target", PROGRAMS)
def test_job_is_submitted(project: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    assert main(["train", "neo4j", *FLAGS, *TARGETS[target]]) == 0
    call, log = CALLS[target]
    assert (project / "called").read_text() == f"{call}\n"
    output = capsys.readouterr().out
    assert output.endswith(f"submitted job run-a; {log}\nrun directory: runs/a\n")
    written = "".join(file.read_text() for file in (project / "runs/a").iterdir() if file.is_file())
    assert "hf_abcdefghijklmnop" not in written
    assert not (project / "datasets_optimized").exists(), "the nodes prepare the data"


def test_submitted_run_is_submitted_again_with_resume(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "neo4j", *FLAGS, *TARGETS["dstack"]]) == 0
    (project / "called").unlink()
    words = ["train", "neo4j", "--resume", "a", *TARGETS["dstack"], "--image", IMAGE, "--time-limit", "03:00:00"]
    assert main([*words, "--dry-run"]) == 0
    assert not (project / "called").exists()
    assert yaml.safe_load((project / "runs/a/train.dstack.yml").read_text())["max_duration"] == "180m"
    assert "Nothing was submitted. In this folder: dstack apply" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job_id"] == "run-a"
    assert (project / "called").exists()


def test_refused_job_keeps_its_files(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS", "3")
    assert main(["train", "neo4j", *FLAGS, *TARGETS["job"]]) == 2
    errors = capsys.readouterr().err
    assert "kubectl refused the job: accepted" in errors
    assert "its files are complete; to submit by hand: kubectl apply --filename runs/a/kubernetes.yaml" in errors
    assert (project / "runs/a/kubernetes.yaml").is_file()


def test_missing_program_is_named_before_anything_is_written(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(project / "nothing"))
    assert main(["train", "neo4j", *FLAGS, *TARGETS["skypilot"]]) == 2
    assert "sky is not on the PATH of this machine\nhint: --dry-run writes" in capsys.readouterr().err
    assert not (project / "runs").exists()


@pytest.mark.parametrize("target", [("--on", "slurm"), ("--image", IMAGE, *TARGETS["dstack"])], ids=" ".join)
def test_plan_for_a_machine_without_a_gpu_is_not_submitted(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", "neo4j", *target, "--dry-run"]) == 2
    assert "such as --gpu h100 --gpus 8" in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_folder_of_an_own_expert_is_copied(project: Path) -> None:
    rows = ROOT / "experts/sql/sample/train.jsonl"
    assert main(["new", "shop", "--data", str(rows)]) == 0
    assert main(["train", "shop", *FLAGS, *TARGETS["skypilot"], "--dry-run"]) == 0
    mounts = yaml.safe_load((project / "runs/a/skypilot.yaml").read_text())["file_mounts"]
    (remote,) = (place for place, source in mounts.items() if isinstance(source, str) and source.endswith("shop"))
    assert (project / mounts[remote] / "manifest.json").is_file()
    assert remote == f"/tmp/launcher/{mounts[remote]}"


def test_defaults_from_variables_are_for_jobs_only(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_IMAGE", IMAGE)
    monkeypatch.setenv("LAUNCHER_VOLUME", "experts")
    monkeypatch.setenv("LAUNCHER_PARTITION", "gpu")
    two = ("--gpu", "h100", "--nodes", "2", "--dry-run")
    assert main(["train", "neo4j", *two, "--run-id", "here"]) == 0
    assert main(["train", "neo4j", *two, "--run-id", "there", "--on", "kubernetes"]) == 0
    assert f"image: {IMAGE}\n" in (project / "runs/there/kubernetes.yaml").read_text()
    assert main(["train", "neo4j", *two, "--run-id", "slurm", "--on", "slurm"]) == 0
    assert "#SBATCH --partition=gpu\n" in (project / "runs/slurm/slurm.sbatch").read_text()
