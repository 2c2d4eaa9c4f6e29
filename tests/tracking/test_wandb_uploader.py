"""The uploader with a real wandb: offline runs read back with wandb's reader, online runs by a small server."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.core import metrics
from launcher.core.metrics import METRICS, load_metrics
from launcher.core.processes import find_children
from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome, write_outcome
from launcher.runs.wandb_settings import load_trace
from tests.conftest import ROOT
from tests.made_runs import MadeRun
from tests.tracking.server import Server, serve
from tests.tracking.uploader_process import (
    OfflineRun,
    cut_rows,
    environment,
    folders,
    make_run,
    read_back,
    upload,
    values_of,
)

pytest.importorskip("wandb")

SECRET = "planted-secret-0123456789"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, OfflineRun, str]:
    """A finished run on a GPU, logged offline."""
    folder = tmp_path_factory.mktemp("uploaded")
    paths = make_run(folder / "runs", MadeRun(run_id="a", num_steps=20, evaluate_every=10))
    env = environment(folder, {"PLANTED_API_KEY": SECRET})
    result = upload(paths, env)
    assert result.returncode == 0, result.stderr
    (logged,) = folders(paths)
    return paths, read_back(logged), result.stderr


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.1)


# Offline -------------------------------------------------------------------------------------------------------------


def test_every_row_is_logged_bit_exactly(uploaded: tuple[RunPaths, OfflineRun, str]) -> None:
    paths, offline, _ = uploaded
    rows = load_metrics(paths.metrics)
    assert len(rows) == 22
    own = [{name: value for name, value in row.items() if not name.startswith("_")} for row in offline.rows]
    assert own == [values_of(row) for row in rows]


def test_metrics_use_the_step_as_x_axis(uploaded: tuple[RunPaths, OfflineRun, str]) -> None:
    _, offline, _ = uploaded
    defined = {record.get("name") or record.get("glob_name"): record for record in offline.of("metric")}
    assert {metric.name for metric in METRICS} | {"train/step", "train/epoch", "eval/*"} == set(defined)
    axes = {name for name, record in defined.items() if not record.get("step_metric")}
    assert axes == {"train/step", metrics.TOKENS_SEEN, metrics.TOTAL_SECONDS}
    assert {record.get("step_metric") for record in defined.values()} == {None, "train/step"}


def test_config_identifies_expert_hardware_and_data(uploaded: tuple[RunPaths, OfflineRun, str]) -> None:
    paths, offline, _ = uploaded
    run, config = offline.run, offline.config
    assert (run["project"], run["run_group"], run["display_name"]) == ("expert-launcher", "neo4j", "a")
    trace = load_trace(paths)
    assert trace is not None
    assert run["run_id"] == trace.id
    assert config["expert"] == "neo4j"
    assert config["gpu"] == "rtx4090"
    assert config["data_key"] == "a" * 64
    assert config["manifest"]["training"]["config"]["rank"] == config["plan"]["adapter"]["rank"] == config["rank"]
    assert config["versions"] == {"launcher": "0.1.0", "torch": "2.13.0"}


def test_summary_has_the_outcome(uploaded: tuple[RunPaths, OfflineRun, str]) -> None:
    _, offline, _ = uploaded
    summary = offline.summary
    assert (summary["status"], summary["exit_code"], summary["steps_done"]) == ("done", 0, 20)
    assert summary[f"median/{metrics.TOKENS_PER_SECOND}"] == pytest.approx(9000, rel=0.05)
    assert [record["exit_code"] for record in offline.of("exit")] == [0]


def test_console_shows_the_sync_command_once(uploaded: tuple[RunPaths, OfflineRun, str]) -> None:
    paths, _, stderr = uploaded
    assert stderr.splitlines() == [
        "W&B: offline (no key: neither WANDB_API_KEY nor a login in ~/.netrc); "
        f"upload it with: wandb sync {paths.root}/wandb/offline-run-*"
    ]


def test_no_private_facts_are_logged(uploaded: tuple[RunPaths, OfflineRun, str]) -> None:
    paths, _, _ = uploaded
    data = b"".join(file.read_bytes() for file in (paths.root / "wandb").rglob("*.wandb"))
    # debug logs of wandb stay on this machine
    forbidden = [SECRET, str(paths.root), str(ROOT), sys.executable, "--parent"]
    names = [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 4 and name != "localhost"]
    assert [word for word in (*forbidden, *names) if word.encode() in data] == []


@pytest.mark.parametrize("status", ["stopped", "crashed"])
def test_error_texts_with_paths_are_not_logged(tmp_path: Path, status: str) -> None:
    """They contain paths, or a traceback."""
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=2))
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    error = f"resume from {paths.root}/checkpoints; /srv/alice/project/train.py"
    write_outcome(paths.outcome, outcome.model_copy(update={"status": status, "exit_code": 75, "error": error}))
    assert upload(paths, environment(tmp_path)).returncode == 0
    data = b"".join(file.read_bytes() for file in (paths.root / "wandb").rglob("*.wandb"))
    assert b"alice" not in data
    assert str(tmp_path).encode() not in data


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        {"WANDB_SWEEP_ID": "abc", "WANDB_RUN_ID": "theirs", "WANDB_PROJECT": "theirs", "WANDB_RESUME": "must"},
        {"WANDB_BASE_URL": "no-url", "WANDB_CONSOLE": "nonsense", "WANDB_DIR": "/nowhere", "WANDB_NAME": "x"},
    ],
)
def test_wandb_variables_of_other_runs_are_ignored(tmp_path: Path, others: dict[str, str]) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=2, evaluate_every=100))
    result = upload(paths, environment(tmp_path, {**others, "WANDB_MODE": "offline"}))
    assert result.returncode == 0, result.stderr
    (offline,) = (read_back(folder) for folder in folders(paths))
    trace = load_trace(paths)
    assert trace is not None
    assert offline.run["run_id"] == trace.id
    assert trace.id.startswith("a-")
    assert offline.run["project"] == trace.project == others.get("WANDB_PROJECT", "expert-launcher")
    assert [row["train/step"] for row in offline.rows] == [1, 2]


def test_resumed_run_keeps_its_id_and_logs_only_new_rows(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=8, evaluate_every=100))
    env = environment(tmp_path)
    rest = cut_rows(paths, 3)
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    write_outcome(paths.outcome, outcome.model_copy(update={"status": "stopped", "exit_code": 75}))
    assert upload(paths, env).returncode == 0
    with paths.metrics.open("a") as file:
        file.writelines(rest)
    write_outcome(paths.outcome, outcome)
    assert upload(paths, env).returncode == 0
    first, second = (read_back(folder) for folder in folders(paths))
    assert first.run["run_id"] == second.run["run_id"]
    assert [row["train/step"] for row in first.rows] == [1, 2, 3, 4, 5]
    assert [row["train/step"] for row in second.rows] == [6, 7, 8]
    assert first.of("preempting") == [{}]
    assert [record["exit_code"] for one in (first, second) for record in one.of("exit")] == [75, 0]
    trace = load_trace(paths)
    assert trace is not None
    assert trace.folders == tuple(f"wandb/{folder.name}" for folder in folders(paths))


def test_requested_artifacts_are_logged(tmp_path: Path) -> None:
    override = 'training.config.wandb.artifacts=["adapter", "manifest"]'
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=2, overrides=(override,)))
    paths.adapter.mkdir()
    (paths.adapter / "adapter_model.safetensors").write_bytes(b"weights")
    assert upload(paths, environment(tmp_path)).returncode == 0
    (offline,) = (read_back(folder) for folder in folders(paths))
    artifacts = {record["name"]: record for record in offline.of("artifact")}
    assert set(artifacts) == {"neo4j-adapter", "neo4j-manifest"}
    assert "adapter_model.safetensors" in str(artifacts["neo4j-adapter"]["manifest"])
    assert "plan.json" in str(artifacts["neo4j-manifest"]["manifest"])


def test_disabled_mode_writes_nothing(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=2))
    result = upload(paths, environment(tmp_path, {"WANDB_MODE": "disabled"}))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not (paths.root / "wandb").exists()
    assert not paths.wandb.exists()


# Online --------------------------------------------------------------------------------------------------------------


def test_online_rows_config_and_end_arrive(server: Server, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="online", num_steps=6, evaluate_every=3))
    result = upload(paths, environment(tmp_path, {**server.environment, "PLANTED_TOKEN": SECRET}))
    assert result.returncode == 0, result.stderr
    trace = load_trace(paths)
    assert trace is not None
    assert (trace.mode, trace.folders) == ("online", ())
    assert result.stderr.strip() == f"W&B: logging to {trace.url}"
    run = server.runs[trace.id]
    assert [row["train/step"] for row in run.rows] == [row.step for row in load_metrics(paths.metrics)]
    assert run.config["expert"] == "neo4j"
    assert run.summary["status"] == "done"
    assert run.exit_code == 0
    assert "error" not in run.summary
    sent = "".join(server.bodies)
    assert [word for word in (SECRET, str(ROOT), str(tmp_path)) if word in sent] == []


def test_online_preempted_run_is_marked_and_resumed(server: Server, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="preempted", num_steps=6, evaluate_every=100))
    env = environment(tmp_path, server.environment)
    rest = cut_rows(paths, 2)
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    write_outcome(paths.outcome, outcome.model_copy(update={"status": "stopped", "exit_code": 75}))
    assert upload(paths, env).returncode == 0
    trace = load_trace(paths)
    assert trace is not None
    run = server.runs[trace.id]
    assert run.is_preempting
    assert (run.exit_code, run.summary["status"]) == (75, "stopped")
    with paths.metrics.open("a") as file:
        file.writelines(rest)
    write_outcome(paths.outcome, outcome)
    assert "W&B: resumed http" in upload(paths, env).stderr
    assert [row["train/step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]


def test_settings_in_the_working_directory_do_not_redirect_the_api_key(server: Server, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="redirected", num_steps=3, evaluate_every=100))
    (tmp_path / ".config/wandb").mkdir(parents=True)
    (tmp_path / ".config/wandb/settings").write_text(f"[default]\nbase_url = {server.environment['WANDB_BASE_URL']}\n")
    (tmp_path / "wandb").mkdir()
    with serve() as other:
        text = f"[default]\nbase_url = {other.environment['WANDB_BASE_URL']}\nentity = somebody\n"
        (tmp_path / "wandb/settings").write_text(text)
        env = environment(tmp_path, {"WANDB_API_KEY": server.environment["WANDB_API_KEY"]})
        result = upload(paths, env, cwd=tmp_path)
        assert other.bodies == []
    assert result.returncode == 0, result.stderr
    trace = load_trace(paths)
    assert trace is not None
    assert trace.id in server.runs


@pytest.mark.slow
def test_online_all_nodes_log_to_one_run(server: Server, tmp_path: Path) -> None:
    """Node 0 logs metrics and outcome; other nodes log system metrics only."""
    made = MadeRun(run_id="nodes", gpu="h100", gpus=8, nodes=2, num_steps=4, evaluate_every=100)
    first, second = (make_run(tmp_path / name, made) for name in ("node0", "node1"))
    env = environment(tmp_path, server.environment)
    assert upload(first, env, "--id", "nodes-1", "--node", "0").returncode == 0
    ended = upload(second, env, "--id", "nodes-1", "--node", "1")
    assert (ended.returncode, ended.stderr) == (0, "")
    run = server.runs["nodes-1"]
    assert [row["train/step"] for row in run.rows] == [1, 2, 3, 4], "logged once"
    assert run.exit_code == 0
    labels = [label for body in server.bodies for label in ("node-0", "node-1") if label in body]
    assert set(labels) == {"node-0", "node-1"}
    assert not second.wandb.exists(), "only node 0 has a trace"


def test_unreachable_server_falls_back_to_offline(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=3, evaluate_every=100))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        closed_url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        result = upload(paths, environment(tmp_path, {"WANDB_BASE_URL": closed_url, "WANDB_API_KEY": "a" * 40}))
    assert result.returncode == 0, result.stderr
    assert "W&B: offline (127.0.0.1 cannot be reached: Connection refused); upload it with: " in result.stderr
    assert "a" * 40 not in result.stderr
    last = read_back([folder for folder in folders(paths) if folder.name.startswith("offline-run-")][-1])
    assert [row["train/step"] for row in last.rows] == [1, 2, 3]


@pytest.mark.slow
def test_rejected_key_falls_back_to_offline(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=3, evaluate_every=100))
    with serve() as server:
        server.refuses = True
        result = upload(paths, environment(tmp_path, server.environment))
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("W&B: offline (the server cannot be used: ")
    last = read_back([folder for folder in folders(paths) if folder.name.startswith("offline-run-")][-1])
    assert [row["train/step"] for row in last.rows] == [1, 2, 3]


@pytest.mark.slow
def test_broken_server_falls_back_to_offline(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", MadeRun(run_id="a", num_steps=3, evaluate_every=100))
    with serve() as server:
        server.is_broken = True
        result = upload(paths, environment(tmp_path, server.environment))
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("W&B: offline (the wandb service failed: ")
    assert "panic" not in result.stderr
    assert "panic" in (paths.logs / "wandb.log").read_text(), "kept in the log"
    last = read_back([folder for folder in folders(paths) if folder.name.startswith("offline-run-")][-1])
    assert [row["train/step"] for row in last.rows] == [1, 2, 3]


# Next to a training ---------------------------------------------------------------------------------------------------


PARENT = """
import os, subprocess, sys, time
words = [sys.executable, "-m", "launcher.training.tracking.wandb_uploader", sys.argv[1], "--parent", str(os.getpid())]
child = subprocess.Popen(words)
print(child.pid, flush=True)
time.sleep(300)
"""
Start = Callable[[RunPaths], tuple[subprocess.Popen[str], int]]


@pytest.fixture
def start_uploader(tmp_path: Path) -> Iterator[Start]:
    """Start a fake training whose child is the uploader; returns the training and the uploader's process id."""
    parents: list[subprocess.Popen[str]] = []

    def start(paths: RunPaths) -> tuple[subprocess.Popen[str], int]:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(paths.root)],
            cwd=ROOT,
            env=environment(tmp_path, {"WANDB_MODE": "offline"}),
            stdout=subprocess.PIPE,
            text=True,
        )
        parents.append(parent)
        assert parent.stdout is not None
        return parent, int(parent.stdout.readline())

    yield start
    for parent in parents:
        parent.kill()
        parent.wait()


def make_unfinished_run(tmp_path: Path, *, num_steps: int) -> tuple[RunPaths, list[str]]:
    made = MadeRun(run_id="a", num_steps=num_steps, evaluate_every=100, status="running")
    paths = make_run(tmp_path / "runs", made)
    return paths, cut_rows(paths, num_steps // 2)


def test_rows_are_logged_live_and_none_is_lost_with_a_killed_training(tmp_path: Path, start_uploader: Start) -> None:
    paths, rest = make_unfinished_run(tmp_path, num_steps=8)
    parent, uploader = start_uploader(paths)
    wait_for(lambda: bool(folders(paths)))
    wait_for(lambda: len(read_back(folders(paths)[0]).rows) == 4)
    with paths.metrics.open("a") as file:
        file.writelines(rest)
    parent.kill()
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{uploader}").exists())
    offline = read_back(folders(paths)[0])
    assert [row["train/step"] for row in offline.rows] == list(range(1, 9))
    assert [record["exit_code"] for record in offline.of("exit")] == [4]
    assert offline.summary["status"] == "crashed", "no final outcome was written"


@pytest.mark.slow
def test_uploader_survives_signals_to_the_training(tmp_path: Path, start_uploader: Start) -> None:
    """A scheduler signals all processes of a job, which kills W&B's service; all rows are still logged."""
    paths, rest = make_unfinished_run(tmp_path, num_steps=8)
    parent, uploader = start_uploader(paths)
    wait_for(lambda: bool(folders(paths)) and len(read_back(folders(paths)[0]).rows) == 4)
    services = [pid for pid, _ in find_children(uploader)]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(uploader, number)
        for pid in services:
            os.kill(pid, number)
    with paths.metrics.open("a") as file:
        file.writelines(rest)
    wait_for(lambda: len(folders(paths)) == 2)
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    done = outcome.model_copy(update={"status": "done", "exit_code": 0, "pid": parent.pid})
    write_outcome(paths.outcome, done)
    wait_for(lambda: not Path(f"/proc/{uploader}").exists() or is_zombie(uploader))
    first, second = (read_back(folder) for folder in folders(paths))
    assert first.run["run_id"] == second.run["run_id"]
    steps = {row["train/step"] for one in (first, second) for row in one.rows}
    assert steps == set(range(1, 9))
    assert [record["exit_code"] for record in second.of("exit")] == [0]


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
