"""The scripts in job files, run on two nodes of this machine: trained, stopped by the platform's signal, resumed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.core.metrics import TRAIN_LOSS, load_metrics
from launcher.core.run_paths import RunPaths
from launcher.runs.record import load_outcome
from tests.conftest import ROOT
from tests.targets.jobs import TARGETS, Loopback, write_job
from tests.unit.cli.test_nodes import TWO_NODES
from tests.unit.standins import wait_until

NUM_STEPS = 40
StartNodes = Callable[..., Loopback]


def make_cluster(folder: Path, target: str, steps: int) -> Loopback:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = (*TWO_NODES, "--max-steps", str(steps), "--time-limit", "01:00:00")
    file = write_job(folder / "runs", target, *flags)
    return Loopback(folder=folder / "cluster", target=target, file=file, port=port)


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[StartNodes]:
    made: list[Loopback] = []

    def make(target: str, steps: int) -> Loopback:
        made.append(make_cluster(tmp_path, target, steps))
        return made[-1]

    yield make
    for loopback in made:
        loopback.close()


def read_adapter(cluster: Loopback) -> bytes:
    return (cluster.paths.adapter / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the adapter of nodes that were not stopped. The platform does not matter for it."""
    cluster = make_cluster(tmp_path_factory.mktemp("undisturbed"), "skypilot", NUM_STEPS)
    try:
        cluster.start()
        codes, errors = cluster.wait()
    finally:
        cluster.close()
    assert codes == [0, 0], errors
    return read_adapter(cluster)


def count_steps(paths: RunPaths) -> int:
    return len(load_metrics(paths.metrics)) if paths.metrics.exists() else 0


def read_status(paths: RunPaths) -> tuple[str, int | None, int]:
    outcome = load_outcome(paths.outcome)
    assert outcome is not None
    return outcome.status, outcome.exit_code, outcome.steps_done


@pytest.mark.parametrize("target", TARGETS)
def test_nodes_get_their_flags_and_the_run_directory(nodes: StartNodes, target: str) -> None:
    """With a program that only records how it is called."""
    cluster = nodes(target, 2)
    cluster.install(f'echo "$@" > {cluster.folder}/called-$6')
    for _ in range(2):  # at the second start the run directory exists
        cluster.start()
        assert cluster.wait() == ([0, 0], "\n")
        address = f"127.0.0.1:{cluster.port}"
        for rank in ("0", "1"):
            words = (cluster.folder / f"called-{rank}").read_text().split()
            flags = ["--resume", str(cluster.paths.root), "--node-rank", rank, "--rendezvous", address]
            assert words == ["train", "neo4j", *flags]
        assert cluster.paths.plan.read_text() == (cluster.file.parent / "plan.json").read_text()
        assert [file.name for file in cluster.paths.root.parent.iterdir()] == ["first"], "no copy is left"
        assert not list(cluster.paths.root.glob(".request*"))
        cluster.paths.request.write_text("{}")  # of an earlier submission
    assert cluster.paths.metrics.exists() is False


def test_run_directory_on_the_volume_keeps_its_plan(nodes: StartNodes) -> None:
    """The request is that of the last submission; `--resume` compares it with the plan of the run on the volume."""
    cluster = nodes("dstack", 2)
    cluster.install("exit 75")
    cluster.paths.logs.mkdir(parents=True)
    cluster.paths.plan.write_text("earlier")
    cluster.paths.request.write_text("earlier")
    cluster.start()
    assert cluster.wait() == ([75, 75], "\n")
    assert cluster.paths.plan.read_text() == "earlier"
    assert cluster.paths.request.read_text() == (cluster.file.parent / "request.json").read_text()


@pytest.mark.process
@pytest.mark.slow
def test_rendered_script_trains_on_two_nodes(nodes: StartNodes) -> None:
    cluster = nodes("skypilot", 2)
    cluster.start()
    codes, errors = cluster.wait()
    assert codes == [0, 0], errors
    assert read_status(cluster.paths) == ("done", 0, 2)
    assert read_adapter(cluster)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_preempted_nodes_resume_to_the_same_bytes(nodes: StartNodes, target: str, undisturbed: bytes) -> None:
    cluster = nodes(target, NUM_STEPS)
    cluster.start()
    wait_until(lambda: count_steps(cluster.paths) >= 3, 300)
    cluster.stop()
    codes, errors = cluster.wait()
    assert codes == [75, 75], errors
    status, code, saved = read_status(cluster.paths)
    assert (status, code) == ("stopped", 75)
    assert 3 <= saved < NUM_STEPS

    cluster.start()
    codes, errors = cluster.wait()
    assert codes == [0, 0], errors
    assert read_status(cluster.paths) == ("done", 0, NUM_STEPS)
    steps = [row.step for row in load_metrics(cluster.paths.metrics) if TRAIN_LOSS in row.values]
    assert steps == list(range(1, NUM_STEPS + 1)), "each step once"
    assert read_adapter(cluster) == undisturbed

    cluster.start()
    assert cluster.wait()[0] == [0, 0], "a finished run is not trained again"
