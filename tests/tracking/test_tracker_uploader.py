"""TensorBoard, read back with its own reader, and MLflow with a real server."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.core import metrics
from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome
from tests.conftest import ROOT, python_path
from tests.made_runs import MadeRun
from tests.tracking.uploader_process import cut_rows, make_run

# A folder with tensorboard and mlflow: `pip install --target FOLDER tensorboard mlflow`.
FOLDER = os.environ.get("LAUNCHER_TEST_TRACKERS", "")
SECRET = "planted-secret-0123456789"


def needs(name: str) -> pytest.MarkDecorator:
    there = (Path(FOLDER) / name).is_dir() if FOLDER else importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not there, reason=f"{name} is not installed; LAUNCHER_TEST_TRACKERS=FOLDER")


def make_environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (python_path(), FOLDER)))
    return {**os.environ, "PYTHONPATH": path, "PLANTED_API_KEY": SECRET, **more}


def upload(paths: RunPaths, name: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher.training.tracking.tracker_uploader", str(paths.root), "--to", name]
    return subprocess.run(command, cwd=ROOT, env=make_environment(**more), capture_output=True, text=True, check=False)


READ_EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
scalars = {tag: [[one.step, one.value] for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
print(json.dumps({"scalars": scalars, "texts": texts}))
"""


def read_events(paths: RunPaths) -> dict[str, Any]:
    command = [sys.executable, "-c", READ_EVENTS, str(paths.root / "tensorboard")]
    shown = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
    return found


@needs("tensorboard")
def test_tensorboard_reads_every_row_once(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=20, evaluate_every=10))
    rows, whole = load_metrics(paths.metrics), paths.metrics.read_bytes()
    cut_rows(paths, 8)  # an earlier attempt
    assert upload(paths, "tensorboard").returncode == 0
    paths.metrics.write_bytes(whole)
    result = upload(paths, "tensorboard")
    assert result.returncode == 0, result.stderr
    assert f"TensorBoard: tensorboard --logdir {tmp_path / 'runs'}" in result.stderr
    found = read_events(paths)
    losses = [[row.step, row.values[metrics.TRAIN_LOSS]] for row in rows if metrics.TRAIN_LOSS in row.values]
    read = found["scalars"][metrics.TRAIN_LOSS]
    assert [step for step, _ in read] == [step for step, _ in losses]
    assert all(math.isclose(ours, theirs, rel_tol=1e-6) for (_, ours), (_, theirs) in zip(losses, read, strict=True))
    assert metrics.EVAL_LOSS in found["scalars"]
    assert "expert: neo4j" in found["texts"]["config"]
    assert "status: done" in found["texts"]["outcome"]
    assert SECRET not in json.dumps(found)


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/db.sqlite", "--artifacts-destination", str(folder)]
    environment = make_environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    with (folder / "server.txt").open("wb") as console:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=console, stderr=console, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 180
    while not is_healthy(url):
        assert process.poll() is None, (folder / "server.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, (folder / "server.txt").read_text()[-3000:]
        time.sleep(0.5)
    yield url
    os.killpg(process.pid, 9)
    process.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/api/2.0/mlflow/{path}", timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_server_has_metrics_parameters_and_status(mlflow_server: str, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=20, evaluate_every=10))
    whole = paths.metrics.read_bytes()
    cut_rows(paths, 8)
    assert upload(paths, "mlflow", MLFLOW_TRACKING_URI=mlflow_server).returncode == 0
    paths.metrics.write_bytes(whole)
    result = upload(paths, "mlflow", MLFLOW_TRACKING_URI=mlflow_server)  # the resumed run
    assert result.returncode == 0, result.stderr
    run_id = json.loads((paths.root / "mlflow.json").read_text())["run_id"]
    run = ask(mlflow_server, f"runs/get?run_id={run_id}")["run"]
    assert (run["info"]["status"], run["info"]["run_name"]) == ("FINISHED", "a")
    assert {"key": "expert", "value": "neo4j"} in run["data"]["params"]
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    found = {one["key"]: one["value"] for one in run["data"]["metrics"]}
    assert found["summary/steps_done"] == outcome.steps_done
    history = ask(mlflow_server, f"metrics/get-history?run_id={run_id}&metric_key={metrics.TRAIN_LOSS}")["metrics"]
    rows = load_metrics(paths.metrics)
    losses = [(row.step, row.values[metrics.TRAIN_LOSS]) for row in rows if metrics.TRAIN_LOSS in row.values]
    assert [(int(one["step"]), one["value"]) for one in history] == losses
    assert SECRET not in json.dumps(run)


@needs("mlflow")
def test_unreachable_mlflow_server_is_reported(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=3))
    result = upload(paths, "mlflow", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert result.returncode == 4
    assert "MLflow: not logged completely: " in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_tracker_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = importlib.util.find_spec
    for is_installed, message in ((False, "not installed: mlflow"), (True, "MLFLOW_TRACKING_URI is not set")):
        module = object() if is_installed else None
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, module=module: module if name == "mlflow" else found(name)
        )
        assert main(["train", "json", "--report-to", "mlflow", "--runs-dir", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
