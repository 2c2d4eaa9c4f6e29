"""Multi-node training as a user starts it: invalid input, shared run directories, two real agents, and Slurm."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.core.errors import InputError
from launcher.core.metrics import TRAIN_LOSS, load_metrics
from launcher.core.run_paths import RunPaths
from launcher.launch.exit_status import explain_missing_nodes, make_node_outcome
from launcher.launch.nodes import Node, find_run_to_join
from launcher.launch.supervise import ChildExit
from launcher.launch.write_run import join_run
from launcher.plan import Plan
from launcher.render import Rendezvous
from launcher.request.request import PlannedRun, Request, plan_request
from launcher.runs.record import Outcome, load_outcome, write_outcome
from tests.conftest import ROOT, python_path
from tests.unit.standins import SHORT_SETTINGS, is_alive, wait_until

pytestmark = pytest.mark.long

SHORT = tuple(word for setting in (*SHORT_SETTINGS, "training.config.logging_steps=1") for word in ("--set", setting))
TWO_NODES = ("--nodes", "2", "--cpu-ranks", "1", "--cores", "1", *SHORT)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data directory shared by all tests, so that the data is prepared once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(data))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(ROOT)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
        return number


def train(folder: Path, *flags: str) -> int:
    return main(["train", "neo4j", "--runs-dir", str(folder / "runs"), *flags])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--node-rank", "2", "--rendezvous", "127.0.0.1:29500"), "--node-rank: 2 is not one of 0 to 1"),
        (("--node-rank", "-1", "--rendezvous", "127.0.0.1:29500"), "'-1' is not an integer of at least 0"),
        (("--node-rank", "0"), "--rendezvous: missing: HOST:PORT where node 0 listens"),
        (("--node-rank", "0", "--rendezvous", "127.0.0.1:29500"), "--run-id: missing: the same id on all nodes"),
        (("--rendezvous", "127.0.0.1:29500"), "--rendezvous: requires --node-rank R"),
        (("--join-timeout", "9"), "--join-timeout: requires --node-rank R"),
        (("--rendezvous", "127.0.0.1"), "'127.0.0.1' is not HOST:PORT"),
        (("--rendezvous", ":29500"), "':29500' is not HOST:PORT"),
        (("--rendezvous", "::1:29500"), "'::1:29500' is not HOST:PORT"),
        (("--rendezvous", "a b:29500"), "'a b:29500' is not HOST:PORT"),
        (("--rendezvous", "$(id):29500"), "is not HOST:PORT"),
        (("--rendezvous", "node0:0"), "'node0:0': a port is a number from 1 to 65535"),
        (("--rendezvous", "node0:65536"), "'node0:65536': a port is a number from 1 to 65535"),
        (("--node-rank", "1", "--nodes", "1"), "--node-rank: requires --nodes N, the number of nodes"),
        (("--node-rank", "1", "--on", "slurm"), "--on: slurm starts the nodes itself"),
        (
            ("--node-rank", "1", "--rendezvous", "nowhere.invalid:29500", "--run-id", "a"),
            "--rendezvous nowhere.invalid:29500: the host cannot be found",
        ),
        (
            ("--node-rank", "1", "--rendezvous", "127.0.0.1:29500", "--run-id", "a", "--max-restarts", "2"),
            "nodes do not restart together under a static rendezvous; use c10d",
        ),
        ((), "--node-rank R --rendezvous HOST:PORT --run-id ID"),
        (("--cpu-ranks", "1", "--gpu", "h100"), "--cpu-ranks and --gpu cannot be used together"),
    ],
)
def test_invalid_flags_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert train(tmp_path, *TWO_NODES, *flags) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_busy_port_is_reported_by_node_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        flags = (*TWO_NODES, "--rendezvous", f"127.0.0.1:{port}", "--run-id", "a")
        assert train(tmp_path, *flags, "--node-rank", "0") == 2
    assert f"node 0 cannot listen on port {port}: it is already in use" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unreachable_node_0_times_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], port: int) -> None:
    began = time.monotonic()
    flags = (*TWO_NODES, "--node-rank", "1", "--rendezvous", f"127.0.0.1:{port}", "--run-id", "a")
    assert train(tmp_path, *flags, "--join-timeout", "1") == 4
    assert time.monotonic() - began < 60
    assert f"node 1 could not reach node 0 at 127.0.0.1:{port} for 1 s: Connection refused" in capsys.readouterr().err
    assert not (tmp_path / "runs/a").exists()


def plan_two(**asked: Any) -> PlannedRun:
    return plan_request(Request(**{"expert": "neo4j", "nodes": 2, "cpu_ranks_per_node": 1, **asked}))


def make_node(rank: int, **more: Any) -> Node:
    return Node(rank=rank, rendezvous=Rendezvous(host="127.0.0.1", port=29500, **more))


def test_nodes_that_share_a_file_system_share_the_directory(tmp_path: Path) -> None:
    planned = plan_two()
    first = join_run(planned, tmp_path, "a", make_node(0))
    before = {file.name: file.read_bytes() for file in first.root.iterdir() if file.is_file()}
    second = join_run(planned, tmp_path, "a", make_node(1))
    assert second.root == first.root
    assert second.console_log != first.console_log
    assert {file.name: file.read_bytes() for file in second.root.iterdir() if file.is_file()} == before
    assert "--main_process_ip 127.0.0.1" in first.command.read_text()
    elsewhere = join_run(planned, tmp_path / "other", "a", make_node(1))
    assert Plan.model_validate_json(elsewhere.plan.read_text()) == planned.plan


def test_different_plan_of_the_same_name_is_refused(tmp_path: Path) -> None:
    join_run(plan_two(), tmp_path, "a", make_node(0))
    other = plan_two(max_steps=7, strategy="zero2")
    with pytest.raises(InputError) as caught:
        find_run_to_join(tmp_path, "a", other.plan, make_node(1))
    message = str(caught.value)
    assert "has a different plan than this node" in message
    assert "  schedule.max_steps: 60 in its plan, 7 on this node" in message
    assert "  strategy: ddp in its plan, zero2 on this node" in message


def test_free_memory_of_a_node_is_not_compared(tmp_path: Path) -> None:
    planned = plan_two()
    join_run(planned, tmp_path, "a", make_node(0))
    hardware = planned.plan.hardware.model_copy(update={"free_vram_mib": 7, "ram_gib_per_node": 3.0})
    plan = planned.plan.model_copy(update={"hardware": hardware})
    assert find_run_to_join(tmp_path, "a", plan, make_node(1)) is not None


@pytest.mark.parametrize(
    ("status", "rank", "said"),
    [
        ("done", 0, "this run has ended already (done)"),
        ("done", 1, "this run has ended already (done)"),
        ("running", 0, "this run has been started already"),
        ("running", 1, None),
    ],
)
def test_finished_run_is_not_joined(tmp_path: Path, status: Any, rank: int, said: str | None) -> None:
    planned = plan_two()
    paths = join_run(planned, tmp_path, "a", make_node(0))
    write_outcome(paths.outcome, Outcome(run_id="a", status=status, started_at="t", pid=1))
    if said is None:
        assert find_run_to_join(tmp_path, "a", planned.plan, make_node(rank)) is not None
        return
    with pytest.raises(InputError, match=said.replace("(", r"\(").replace(")", r"\)")):
        find_run_to_join(tmp_path, "a", planned.plan, make_node(rank))


def test_foreign_directory_is_not_joined(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.utime(tmp_path / "a", (1, 1))  # old enough that no other node can still be writing it
    with pytest.raises(InputError, match="is missing or cannot be read"):
        find_run_to_join(tmp_path, "a", plan_two().plan, make_node(1))


def ended(code: int, tail: str = "") -> ChildExit:
    return ChildExit(pid=1, returncode=code, stop_requested=False, was_forced=False, stderr_tail=tail)


def test_outcome_of_node_1_follows_the_exit_codes_of_its_ranks(tmp_path: Path) -> None:
    paths, now = RunPaths(tmp_path, node_rank=1), datetime.now(UTC)

    def outcome(ending: ChildExit) -> Outcome:
        return make_node_outcome(paths, ending, None, now, make_node(1))

    assert (outcome(ended(0)).status, outcome(ended(0)).exit_code) == ("done", 0)
    stopped = outcome(ended(1, "  exitcode  : 75 (pid: 12)"))
    assert (stopped.status, stopped.exit_code) == ("stopped", 75)
    failed = outcome(ended(1, "  exitcode  : 1 (pid: 12)"))
    assert (failed.status, failed.exit_code) == ("crashed", 4)
    unlike = outcome(ended(1, "  exitcode  : 5 (pid: 12)"))
    assert (unlike.status, unlike.exit_code) == ("failed", 5)
    assert "node 1: its ranks ended with exit code 1" in failed.error
    assert "console-node1.log" in failed.error
    assert "was killed (SIGKILL)" in outcome(ended(-9)).error


def test_missing_nodes_are_counted(tmp_path: Path) -> None:
    tail = "torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 2/4 clients joined."
    error = explain_missing_nodes(RunPaths(tmp_path), ended(1, tail), make_node(0), 4)
    assert error is not None
    assert "the 4 nodes did not all join at 127.0.0.1:29500 within 300 s; 2 of 4 joined" in str(error)
    assert explain_missing_nodes(RunPaths(tmp_path), ended(1, "ValueError: no"), make_node(0), 4) is None


class Nodes:
    """The launchers of a two-node run, each in a separate process."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self.started: list[subprocess.Popen[str]] = []

    def start(self, rank: int, *flags: str, runs: str = "runs") -> subprocess.Popen[str]:
        words = ["train", "neo4j", "--runs-dir", str(self._folder / runs), *TWO_NODES, "--run-id", "a"]
        words += ["--node-rank", str(rank), "--rendezvous", f"127.0.0.1:{self._port}", *flags]
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def paths(self, rank: int = 0, runs: str = "runs") -> RunPaths:
        return RunPaths(self._folder / runs / "a", node_rank=rank)

    def close(self) -> None:
        for process in self.started:
            for _ in range(2):
                if process.poll() is None:
                    process.terminate()
                    time.sleep(0.5)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)


@pytest.fixture
def nodes(tmp_path: Path, port: int) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, port)
    yield nodes
    nodes.close()


def finish(process: subprocess.Popen[str], seconds: float = 180) -> tuple[int, str]:
    _, error = process.communicate(timeout=seconds)
    return process.returncode, error


def losses(paths: RunPaths) -> list[float]:
    return [loss for step in load_metrics(paths.metrics) if (loss := step.get(TRAIN_LOSS)) is not None]


@pytest.mark.process
@pytest.mark.slow
def test_two_nodes_train_like_one_process(tmp_path: Path, nodes: Nodes) -> None:
    """Each node has its own run directory, as without a shared file system. Node 1 starts first and waits."""
    early = nodes.start(1, "--max-steps", "3", runs="runs1")
    head = nodes.start(0, "--max-steps", "3")
    for process in (head, early):
        code, error = finish(process)
        assert code == 0, error
    outcome = load_outcome(nodes.paths().outcome)
    assert outcome is not None
    assert (outcome.status, outcome.steps_done) == ("done", 3)
    assert not nodes.paths(1, "runs1").outcome.exists(), "the record is rank 0's"
    alone = [sys.executable, "-m", "launcher", "train", "neo4j", *SHORT, "--max-steps", "3", "--run-id", "one"]
    subprocess.run(
        [*alone, "--runs-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        check=True,
    )
    ours, theirs = losses(nodes.paths()), losses(RunPaths(tmp_path / "one"))
    assert len(ours) == len(theirs) == 3
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def find_agent(launcher: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


@pytest.mark.process
@pytest.mark.slow
def test_killed_agent_ends_both_nodes(nodes: Nodes) -> None:
    """Both nodes share the run directory."""
    head, other = nodes.start(0, "--max-steps", "2000"), nodes.start(1, "--max-steps", "2000")
    metrics = nodes.paths().metrics
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 120)
    agent = find_agent(other.pid)
    os.kill(agent, signal.SIGKILL)
    killed_at = time.monotonic()
    code, error = finish(other, 60)
    assert code == 4
    assert "error: the training was killed (SIGKILL)" in error
    code, error = finish(head, 60)
    assert code != 0
    assert time.monotonic() - killed_at < 60
    outcome = load_outcome(nodes.paths().outcome)
    assert outcome is not None
    # Its agent stops it once it learns of the lost node, unless the failed collective is noticed first.
    assert (outcome.exit_code, outcome.status) in ((4, "failed"), (75, "stopped"))
    assert outcome.exit_code == code
    assert outcome.error.splitlines()[-1][:40] in error, "the survivor's console tells what its record tells"
    assert not is_alive(agent)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake sbatch first on PATH, which records how it is called."""
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\npwd > {tmp_path}/called\nprintf "%s\\n" "$@" >> {tmp_path}/called\necho "4242;main"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


SLURM = (*TWO_NODES, "--on", "slurm", "--run-id", "a")


@pytest.mark.usefixtures("slurm")
def test_job_is_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = ("--partition", "gpu,big", "--account", "lab-7", "--time-limit", "1-02:30:00")
    assert train(tmp_path, *SLURM, *site) == 0
    root = tmp_path / "runs/a"
    assert (tmp_path / "called").read_text() == f"{ROOT}\n--parsable\n{root}/slurm.sbatch\n"
    output = capsys.readouterr().out
    assert output.endswith(f"submitted job 4242; its log: {root}/logs/slurm-4242.log\nrun directory: {root}\n")
    script = (root / "slurm.sbatch").read_text()
    for line in ("--partition=gpu,big", "--account=lab-7", "--time=1-02:30:00", "--nodes=2"):
        assert f"#SBATCH {line}\n" in script
    assert not (root / "outcome.json").exists()


@pytest.mark.usefixtures("slurm")
def test_job_of_one_node_is_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        train(tmp_path, "--profile", "smoke", "--gpu", "h100", "--on", "slurm", "--run-id", "a", "--json", *SHORT) == 0
    )
    summary = json.loads(capsys.readouterr().out)
    assert (summary["job_id"], summary["started"]) == ("4242", False)
    script = tmp_path / "runs/a/slurm.sbatch"
    assert "#SBATCH --nodes=1\n" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_files_of_a_refused_job_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], slurm: Path) -> None:
    slurm.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    assert train(tmp_path, *SLURM, "--partition", "x") == 2
    errors = capsys.readouterr().err
    assert "error: sbatch refused the job: sbatch: error: invalid partition specified: x\n" in errors
    assert f"sbatch {tmp_path}/runs/a/slurm.sbatch" in errors
    assert (tmp_path / "runs/a/plan.json").is_file()


def test_missing_sbatch_is_refused_before_data_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("LAUNCHER_DATA_DIR", str(tmp_path / "data"))
    assert train(tmp_path, *SLURM) == 2
    errors = capsys.readouterr().err
    assert "sbatch is not on the PATH of this machine\nhint: --dry-run writes the run directory" in errors
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "data").exists()
    assert train(tmp_path, *SLURM, "--dry-run") == 0
    assert (tmp_path / "runs/a/slurm.sbatch").is_file()
    assert not (tmp_path / "data").exists()
    assert f"sbatch {tmp_path}/runs/a/slurm.sbatch" in capsys.readouterr().out


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--partition", "p"), "--partition: requires --on {slurm,skypilot,kubernetes,dstack}"),
        (("--image", "a:1"), "--image: requires --on"),
        (("--slurm", "--no-submit"), "unrecognized arguments: --slurm --no-submit\nhint: write --on slurm --dry-run"),
        (("--on", "slurm", "--image", "a:1"), "--image: applies only to --on skypilot or kubernetes or dstack"),
        (("--on", "skypilot", "--partition", "p"), "--partition: applies only to --on slurm"),
        (("--on", "kubernetes", "--on-demand"), "--on-demand: applies only to --on skypilot or dstack"),
        (("--on", "dstack", "--workload", "job"), "--workload: applies only to --on kubernetes"),
        (("--on", "slurm", "--max-restarts", "2"), "--max-restarts: has no effect: slurm has its own rules"),
        (("--on", "dstack"), "--image: missing: the image that the nodes run"),
        (("--on", "kubernetes", "--image", "a:1"), "--volume: missing: the name of a persistent volume claim, which"),
        (("--on", "kubernetes", "--image", "a:1", "--volume", "s3://a"), "--volume: 's3://a' is not the name of a"),
        (("--on", "dstack", "--image", "a:1", "--volume", "s3://a"), "--volume: 's3://a' is not a volume's name or an"),
        (("--on", "skypilot", "--image", "a:1", "--volume", "/a"), "--volume: '/a' is not a volume's name or a bucket"),
        (("--on", "skypilot", "--image", "a"), "'a' is not an image with a tag"),
        (("--on", "skypilot", "--image", "a:latest"), "'a:latest' is not an image with a tag (other than latest)"),
        (("--on", "skypilot", "--image", "a:1\nb: 2"), "is not an image with a tag"),
        (("--on", "skypilot", "--volume", "a: b"), "'a: b' is not the name of a volume"),
        (("--on", "skypilot", "--secrets", "HF_TOKEN=hf_abc"), "give only the names of variables"),
        (("--on", "airflow"), "invalid choice: 'airflow'"),
        (("--on", "slurm", "--time-limit", "90"), "'90' is not a time limit"),
        (("--on", "slurm", "--time-limit", "00:00:00"), "'00:00:00' is not a time limit"),
        (("--on", "slurm", "--time-limit", "01:60:00"), "'01:60:00' is not a time limit"),
        (("--on", "slurm", "--partition", "a\n#SBATCH --uid=0"), "is not a valid Slurm name"),
        (("--on", "slurm", "--account=-x"), "is not a valid Slurm name"),
        (("--on", "slurm", "--partition", "gpu\n"), "'gpu\\n' is not a valid Slurm name"),
        (("--on", "skypilot", "--image", "a:1\n"), "'a:1\\n' is not an image with a tag"),
        (("--on", "skypilot", "--volume", "a\n"), "'a\\n' is not the name of a volume"),
    ],
)
def test_invalid_job_flags_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert train(tmp_path, *TWO_NODES, *flags) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "hf_abc" not in errors
    assert not (tmp_path / "called").exists()
    assert not (tmp_path / "runs").exists()


def test_node_keeps_the_record_only_if_rank_0_runs_there() -> None:
    assert make_node(0).keeps_record
    assert not make_node(1).keeps_record
    assert not make_node(0, backend="c10d").keeps_record
    six = replace(make_node(0), rendezvous=Rendezvous(host="fd00::1", port=29500))
    assert six.address == "[fd00::1]:29500"


@pytest.mark.parametrize(
    ("target", "price", "is_warned"),
    [("dstack", "3EUR", True), ("dstack", "3USD", False), ("kubernetes", "3EUR", False)],
)
def test_price_in_another_currency_is_no_limit_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, price: str, is_warned: bool
) -> None:
    job = ("--on", target, "--image", "a:1", "--volume", "v", "--dry-run", "--run-id", "a")
    assert train(tmp_path, "--gpu", "h100", "--price", price, *job) == 0
    warning = f"the job has no price limit: {target} has prices in dollars, and the price is in EUR"
    assert (warning in capsys.readouterr().err) == is_warned
