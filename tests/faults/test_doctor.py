"""`launcher doctor` reports real faults: slow data loading, slow steps, a small /dev/shm, a full disk, a killed run.

A healthy run has no findings.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths
from launcher.launch.start import ACCELERATE
from launcher.launch.write_run import write_run
from launcher.render import render_command
from launcher.request.request import Request, plan_request
from tests.conftest import ROOT, python_path
from tests.faults.slow_train import LOADING_VARIABLE, SLOW_VARIABLE

SLOW_TRAIN_SCRIPT = str(ROOT / "tests/faults/slow_train.py")
LIMIT_SECONDS = 240.0
# Short steps: delays show soon.
SMALL = (
    "training.config.batch_size=2",
    "training.config.gradient_accumulation_steps=1",
    "training.config.max_seq_length=256",
)
NO_EVALUATION = ("training.config.evaluation_strategy=no", "training.config.load_best_model_at_end=false")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data folder of all runs: rows are prepared once."""
    return tmp_path_factory.mktemp("doctor")


def environment(data_dir: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if name not in ("WANDB_API_KEY", "WANDB_MODE")}
    own = {"LAUNCHER_DATA_DIR": str(data_dir), "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return {**base, **own, "HOME": str(data_dir), **(more or {})}


def start(data_dir: Path, run_id: str, num_steps: int, *settings: str) -> tuple[RunPaths, list[str]]:
    request = Request(
        expert="neo4j", profile="smoke", max_steps=num_steps, overrides=(*SMALL, *NO_EVALUATION, *settings)
    )
    planned = plan_request(request)
    paths = write_run(planned, data_dir / "runs", run_id)
    return paths, list(render_command(planned.plan, paths, script=SLOW_TRAIN_SCRIPT, accelerate=ACCELERATE).argv)


def train(data_dir: Path, run_id: str, num_steps: int, *settings: str, **variables: str) -> RunPaths:
    paths, command = start(data_dir, run_id, num_steps, *settings)
    log = data_dir / f"{run_id}.log"
    with log.open("wb") as console:
        subprocess.run(
            command,
            env=environment(data_dir, variables),
            stdout=console,
            stderr=console,
            check=True,
            timeout=LIMIT_SECONDS,
        )
    return paths


def doctor(data_dir: Path, *arguments: str, more: Mapping[str, str] | None = None) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "launcher", "doctor", *arguments, "--quick", "--json"]
    done = subprocess.run(
        command, cwd=data_dir, env=environment(data_dir, more), capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)["findings"]


def select_run_findings(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [finding for finding in findings if finding["family"] == "run" and finding["status"] != "ok"]


@pytest.mark.slow
def test_healthy_run_has_no_findings(data_dir: Path) -> None:
    settings = [word for setting in (*SMALL, *NO_EVALUATION) for word in ("--set", setting)]
    runs = ["--runs-dir", str(data_dir / "runs"), "--run-id", "healthy"]
    command = [sys.executable, "-m", "launcher", "train", str(ROOT / "experts/neo4j/manifest.json"), *settings, *runs]
    subprocess.run(
        [*command, "--max-steps", "16"],
        env=environment(data_dir),
        capture_output=True,
        check=True,
        timeout=LIMIT_SECONDS,
    )
    _, findings = doctor(data_dir, "--run", "healthy", "--runs-dir", str(data_dir / "runs"))
    found = [finding["subject"] for finding in select_run_findings(findings)]
    if found == ["host load"]:
        pytest.skip("other programs use the CPU")
    assert found == []
    summary = next(finding for finding in findings if finding["subject"] == "run")
    assert summary["found"].startswith("healthy: 16 steps, ")
    assert re.search(r"loss \d+\.\d+ -> \d", summary["found"])


@pytest.mark.slow
def test_slow_data_loader_is_reported(data_dir: Path) -> None:
    one = "training.config.dataloader_num_workers=1"
    paths = train(data_dir, "starving", 12, one, **{LOADING_VARIABLE: "1.0"})
    code, findings = doctor(data_dir, "--run", str(paths.root))
    (data,) = (finding for finding in select_run_findings(findings) if finding["subject"] == "data")
    assert (code, data["status"]) == (7, "problem")
    assert " % of the step time waits for data" in data["found"]
    assert "1 loader worker, " in data["found"]
    assert "the device idles until its batches are ready" in data["matters"]
    assert "launcher data --move-to DIR" in data["next_step"]


@pytest.mark.slow
def test_periodic_slow_steps_are_reported_with_their_period(data_dir: Path) -> None:
    paths = train(data_dir, "pattern", 24, **{SLOW_VARIABLE: "6:1.0"})
    code, findings = doctor(data_dir, "--run", str(paths.root))
    (slow,) = (finding for finding in select_run_findings(findings) if finding["subject"] == "slow steps")
    assert (code, slow["status"]) == (7, "problem")
    assert slow["found"].startswith("every 3 steps, one is slow (steps ")
    assert "nothing in the plan has this interval" in slow["matters"]


@pytest.mark.slow
def test_live_and_killed_runs_are_distinguished(data_dir: Path) -> None:
    paths, command = start(data_dir, "killed", 200)
    process = subprocess.Popen(
        command,
        env=environment(data_dir),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for_steps(paths, 10, process)
        _, findings = doctor(data_dir, "--run", str(paths.root))
        status = next(finding for finding in findings if finding["subject"] == "status")
        assert status["status"] == "ok"
        assert status["found"].startswith("running, ")
        assert " left" in status["found"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _, findings = doctor(data_dir, "--run", str(paths.root))
    status = next(finding for finding in findings if finding["subject"] == "status")
    assert (status["status"], status["next_step"]) == ("note", "check again in a minute")
    _make_old(paths.metrics)
    code, findings = doctor(data_dir, "--run", str(paths.root))
    status = next(finding for finding in findings if finding["subject"] == "status")
    assert (code, status["status"]) == (7, "problem")
    assert "no process trains it" in status["found"]
    assert "--resume killed" in status["next_step"]


def _make_old(file: Path) -> None:
    then = time.time() - 120
    os.utime(file, (then, then))


def _wait_for_steps(paths: RunPaths, num_steps: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not paths.metrics.is_file() or len(load_metrics(paths.metrics)) < num_steps:
        assert process.poll() is None, "the training ended"
        assert time.monotonic() < deadline, "the training makes no steps"
        time.sleep(0.3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk_is_reported(data_dir: Path, small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 60 << 10)
    code, findings = doctor(data_dir, "neo4j", "--runs-dir", str(small_disk / "runs"))
    (runs,) = (finding for finding in findings if finding["family"] == "disks" and finding["subject"] == "runs")
    assert (code, runs["status"]) == (7, "problem")
    assert "the disk is full: 0 MiB free on " in runs["found"]
    assert "choose a folder on another disk with --runs-dir" in runs["next_step"]
    (checkpoints,) = (finding for finding in findings if finding["subject"] == "checkpoints")
    assert checkpoints["status"] == "problem"


def test_small_shm_is_reported(data_dir: Path) -> None:
    """In a separate mount namespace, invisible to other processes."""
    inside = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && {sys.executable} -m launcher doctor --quick --json"
    command = ["unshare", "--mount", "sh", "-c", inside]
    done = subprocess.run(command, cwd=data_dir, env=environment(data_dir), capture_output=True, text=True, check=False)
    if not done.stdout:
        pytest.skip(f"/dev/shm cannot be made small here: {done.stderr.strip()}")
    (shared,) = (one for one in json.loads(done.stdout)["findings"] if one["subject"] == "shared memory")
    assert (done.returncode, shared["status"]) == (7, "problem")
    assert shared["found"] == "64 KiB of 64 KiB free; 64 MiB are needed"
    assert "--shm-size=8g" in shared["next_step"]
