"""Real faults, each named by `launcher doctor`: starving, slow steps, a small /dev/shm, a full disk, a death.

And what is healthy: nothing is named.
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

from launcher.inputs import Request, plan_request
from launcher.launch import ACCELERATE, write_run
from launcher.metrics import load_metrics
from launcher.paths import RunPaths
from launcher.render import render_command
from tests.conftest import ROOT, python_path
from tests.faults.hindered_train import LOADING_VARIABLE, SLOW_VARIABLE

HINDERED = str(ROOT / "tests/faults/hindered_train.py")
LIMIT_SECONDS = 240.0
# Small steps: what holds them up shows soon.
SMALL = (
    "training.config.batch_size=2",
    "training.config.gradient_accumulation_steps=1",
    "training.config.max_seq_length=256",
)
UNEVALUATED = ("training.config.evaluation_strategy=no", "training.config.load_best_model_at_end=false")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows are prepared once for all runs."""
    return tmp_path_factory.mktemp("doctor")


def environment(place: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if name not in ("WANDB_API_KEY", "WANDB_MODE")}
    own = {"LAUNCHER_DATA_DIR": str(place), "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return {**base, **own, "HOME": str(place), **(more or {})}


def start(place: Path, run_id: str, num_steps: int, *settings: str) -> tuple[RunPaths, list[str]]:
    request = Request(expert="neo4j", profile="smoke", max_steps=num_steps, overrides=(*SMALL, *UNEVALUATED, *settings))
    planned = plan_request(request)
    paths = write_run(planned, place / "runs", run_id)
    return paths, list(render_command(planned.plan, paths, script=HINDERED, accelerate=ACCELERATE).argv)


def train(place: Path, run_id: str, num_steps: int, *settings: str, **hindrances: str) -> RunPaths:
    paths, command = start(place, run_id, num_steps, *settings)
    log = place / f"{run_id}.log"
    with log.open("wb") as console:
        subprocess.run(
            command,
            env=environment(place, hindrances),
            stdout=console,
            stderr=console,
            check=True,
            timeout=LIMIT_SECONDS,
        )
    return paths


def doctor(place: Path, *arguments: str, more: Mapping[str, str] | None = None) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "launcher", "doctor", *arguments, "--quick", "--json"]
    done = subprocess.run(command, cwd=place, env=environment(place, more), capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)["findings"]


def of_run(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [finding for finding in findings if finding["family"] == "run" and finding["status"] != "ok"]


@pytest.mark.slow
def test_a_healthy_run_is_praised(place: Path) -> None:
    settings = [word for setting in (*SMALL, *UNEVALUATED) for word in ("--set", setting)]
    runs = ["--runs-dir", str(place / "runs"), "--run-id", "healthy"]
    command = [sys.executable, "-m", "launcher", "train", str(ROOT / "experts/neo4j/manifest.json"), *settings, *runs]
    subprocess.run(
        [*command, "--max-steps", "16"], env=environment(place), capture_output=True, check=True, timeout=LIMIT_SECONDS
    )
    _, findings = doctor(place, "--run", "healthy", "--runs-dir", str(place / "runs"))
    assert of_run(findings) == []
    praise = next(finding for finding in findings if finding["subject"] == "run")
    assert praise["found"].startswith("healthy: 16 steps, ")
    assert re.search(r"loss \d+\.\d+ -> \d", praise["found"])


@pytest.mark.slow
def test_one_worker_on_a_heavy_loader_starves_the_training(place: Path) -> None:
    one = "training.config.dataloader_num_workers=1"
    paths = train(place, "starving", 12, one, **{LOADING_VARIABLE: "0.4"})
    code, findings = doctor(place, "--run", str(paths.root))
    (data,) = (finding for finding in of_run(findings) if finding["subject"] == "data")
    assert (code, data["status"]) == (7, "problem")
    assert " % of a step waits for data" in data["found"]
    assert "1 loader worker, " in data["found"]
    assert "the CPU starves the device" in data["matters"]
    assert "launcher data --move-to DIR" in data["next_step"]


@pytest.mark.slow
def test_a_pattern_of_slow_steps_is_named_with_its_period(place: Path) -> None:
    paths = train(place, "pattern", 24, **{SLOW_VARIABLE: "6:1.0"})
    code, findings = doctor(place, "--run", str(paths.root))
    (slow,) = (finding for finding in of_run(findings) if finding["subject"] == "slow steps")
    assert (code, slow["status"]) == (7, "problem")
    assert slow["found"].startswith("every 3 steps one is slow (steps ")
    assert "nothing in the plan comes as often" in slow["matters"]


@pytest.mark.slow
def test_a_run_that_lives_is_told_from_one_that_was_killed(place: Path) -> None:
    paths, command = start(place, "killed", 200)
    process = subprocess.Popen(
        command,
        env=environment(place),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for_steps(paths, 10, process)
        _, findings = doctor(place, "--run", str(paths.root))
        status = next(finding for finding in findings if finding["subject"] == "status")
        assert status["status"] == "ok"
        assert status["found"].startswith("running, ")
        assert " left" in status["found"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _, findings = doctor(place, "--run", str(paths.root))
    status = next(finding for finding in findings if finding["subject"] == "status")
    assert (status["status"], status["next_step"]) == ("note", "look again in a minute")
    _make_old(paths.metrics)
    code, findings = doctor(place, "--run", str(paths.root))
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


def test_a_full_disk_is_named(place: Path, small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 60 << 10)
    code, findings = doctor(place, "neo4j", "--runs-dir", str(small_disk / "runs"))
    (runs,) = (finding for finding in findings if finding["family"] == "disks" and finding["subject"] == "runs")
    assert (code, runs["status"]) == (7, "problem")
    assert "the disk is full: 0 MiB free on " in runs["found"]
    assert "--runs-dir names a folder on another disk" in runs["next_step"]
    (checkpoints,) = (finding for finding in findings if finding["subject"] == "checkpoints")
    assert checkpoints["status"] == "problem"


def test_a_tiny_shm_is_named(place: Path) -> None:
    """In a mount namespace of its own, so that nobody else sees it."""
    inside = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && {sys.executable} -m launcher doctor --quick --json"
    command = ["unshare", "--mount", "sh", "-c", inside]
    done = subprocess.run(command, cwd=place, env=environment(place), capture_output=True, text=True, check=False)
    if not done.stdout:
        pytest.skip(f"/dev/shm cannot be made small here: {done.stderr.strip()}")
    (shared,) = (one for one in json.loads(done.stdout)["findings"] if one["subject"] == "shared memory")
    assert (done.returncode, shared["status"]) == (7, "problem")
    assert shared["found"] == "64 KiB of 64 KiB free; 64 MiB are needed"
    assert "--shm-size=8g" in shared["next_step"]
