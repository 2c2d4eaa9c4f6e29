"""`launcher train --on slurm` on a real Slurm: two nodes, the signal before the time limit, requeue, equal adapters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.core.metrics import TRAIN_LOSS, load_metrics
from launcher.core.processes import find_processes, send_signal
from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome
from tests.conftest import ROOT
from tests.distributed.harness import Harness, TrainedRun, TrainingCase, make_harness
from tests.slurm.cluster import Cluster, find_missing

MISSING = find_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no Slurm here: {MISSING}")
CONFIG = {"max_steps": 60, "eval_steps": 60, "save_steps": 60, "load_best_model_at_end": False}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(folder=tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return make_harness(tmp_path_factory.mktemp("harness"))


def submit(cluster: Cluster, harness: Harness, manifest: Path, run_id: str) -> tuple[str, RunPaths]:
    """Submit a job as a user does, from the project root."""
    command = [
        *(sys.executable, "-m", "launcher", "train", str(manifest), "--profile", "full", "--on", "slurm", "--json"),
        *("--nodes", "2", "--cpu-ranks", "1", "--cores", "2", "--strategy", "ddp", "--time-limit", "01:00:00"),
        *("--runs-dir", str(harness.runs), "--run-id", run_id),
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**harness.environment, **cluster.environment, "PATH": path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    return summary["job_id"], RunPaths(Path(summary["path"]))


def count_steps(paths: RunPaths) -> int:
    return len(load_metrics(paths.metrics)) if paths.metrics.exists() else 0


def test_preempted_job_is_requeued_and_finishes_with_equal_results(cluster: Cluster, harness: Harness) -> None:
    case = TrainingCase(strategy="ddp", ranks_per_node=1, nodes=2, config=CONFIG, global_batch=2)
    manifest = harness.manifest(case)
    job, paths = submit(cluster, harness, manifest, "preempted")
    logs = [paths.logs / f"slurm-{job}.log"]
    cluster.wait_until(lambda: count_steps(paths) >= 3, 180, logs)
    assert cluster.show_job(job)["JobState"] == "RUNNING"
    cluster.ask("scancel", "--signal=USR1", job)  # as Slurm does before the limit: to the steps, not to the script
    cluster.wait_until(lambda: cluster.show_job(job).get("Restarts") == "1", 120, logs)
    stopped = load_outcome(paths.outcome)
    assert stopped is not None
    assert (stopped.status, stopped.exit_code) == ("stopped", 75)
    saved = stopped.steps_done
    assert 3 <= saved < 60, "in the middle"
    assert paths.checkpoint(saved).is_dir()

    # Slurm delays a requeued job: started earlier, it could be ended by a late message about its first end.
    cluster.wait_until(lambda: cluster.show_job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), 300, logs)
    assert cluster.show_job(job)["JobState"] == "COMPLETED", cluster.read_logs(logs)
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    assert (outcome.status, outcome.exit_code, outcome.steps_done) == ("done", 0, 60)
    assert [attempt.from_step for attempt in outcome.attempts] == [0, saved]
    log = logs[0].read_text()
    assert f"resuming after step {saved}" in log, "one log, written on"
    steps = [row.step for row in load_metrics(paths.metrics) if TRAIN_LOSS in row.values]
    assert steps == list(range(1, 61)), "each step once"

    other, undisturbed = submit(cluster, harness, manifest, "undisturbed")
    cluster.wait_until(lambda: cluster.show_job(other)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), 300)
    files = [TrainedRun(run).paths.adapter / "adapter_model.safetensors" for run in (paths, undisturbed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_failed_job_is_not_requeued(cluster: Cluster, harness: Harness) -> None:
    case = TrainingCase(strategy="ddp", ranks_per_node=1, nodes=2, config=CONFIG, global_batch=2)
    job, paths = submit(cluster, harness, harness.manifest(case), "broken")
    logs = [paths.logs / f"slurm-{job}.log"]
    cluster.wait_until(lambda: count_steps(paths) >= 2, 180, logs)
    mine = str(paths.plan).encode()
    workers = [pid for pid in find_processes("RANK=1") if mine in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert workers
    send_signal(workers, signal.SIGKILL)
    cluster.wait_until(lambda: cluster.show_job(job)["JobState"] not in ("RUNNING", "COMPLETING"), 120, logs)
    assert cluster.show_job(job)["JobState"] == "FAILED"
    assert cluster.show_job(job)["Restarts"] == "0"
