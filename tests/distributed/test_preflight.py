"""Two nodes on the loopback interface, each with a checkout: different ones are refused before anything is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.launch.start import ACCELERATE
from launcher.launch.write_run import write_run
from launcher.render import Rendezvous, render_command
from tests.conftest import ROOT
from tests.distributed.harness import Harness, ProcessResult, TrainedRun, TrainingCase, get_free_port
from tests.training.builders import vary

CASE = TrainingCase(strategy="ddp", ranks_per_node=1, nodes=2)
TITLE = "the nodes cannot train together"


def make_checkout(folder: Path, remark: str) -> tuple[Path, str]:
    """Commit a copy of the package; return its training script and the commit."""
    shutil.copytree(ROOT / "launcher", folder / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    script = folder / "launcher/train.py"
    script.write_text(f"{script.read_text()}\n# {remark}\n")
    for command in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", remark),
    ):
        subprocess.run(("git", "-C", str(folder), *command), check=True, capture_output=True)
    commit = subprocess.run(("git", "-C", str(folder), "rev-parse", "HEAD"), check=True, capture_output=True, text=True)
    return script, commit.stdout.strip()


def run_nodes(
    harness: Harness,
    scripts: list[Path],
    runs: list[RunPaths],
    data: Path,
    backend: Literal["static", "c10d"] = "static",
) -> list[ProcessResult]:
    planned = harness.plan(CASE)
    port = get_free_port()
    commands = [
        render_command(
            planned.plan,
            paths,
            rendezvous=Rendezvous(
                host="127.0.0.1", port=port, backend=backend, is_host=None if backend == "static" else node == 0
            ),
            machine_rank=node,
            script=str(script),
            accelerate=ACCELERATE,
        )
        for node, (script, paths) in enumerate(zip(scripts, runs, strict=True))
    ]
    where = {"LAUNCHER_DATA_DIR": str(data)}
    with harness.started(commands[0], **where) as first, harness.started(commands[1], **where) as second:
        return [child.wait(120) for child in (first, second)]


@pytest.mark.slow
def test_different_commit_plan_and_data_are_refused(harness: Harness, tmp_path: Path) -> None:
    """Node 0 prints all differences, node 1 one line, and both end with the same exit code."""
    checkouts = [make_checkout(tmp_path / name, name) for name in ("one", "other")]
    planned = harness.plan(CASE)
    ours = write_run(planned, harness.runs, "preflight-one")
    folder = tmp_path / "rows"
    folder.mkdir()
    for file in harness.folder.glob("*.jsonl"):
        (folder / file.name).write_text(file.read_text().replace("?", "!"))
    changed = vary(planned.plan, {"optimizer.learning_rate": 0.5, "data.folder": str(folder)})
    theirs = write_run(replace(planned, plan=changed), harness.runs, "preflight-other")
    ended = run_nodes(harness, [script for script, _ in checkouts], [ours, theirs], tmp_path)
    outcome = TrainedRun(ours).outcome
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.WRONG_TOPOLOGY), ended[0].console
    for one in ended:
        assert "exitcode  : 5" in one.console, one.console
        assert "Traceback" not in one.console.partition("torch/distributed/elastic")[0]
    lines = outcome.error.splitlines()
    assert lines[0] == TITLE
    assert [line.split(": ")[0].strip() for line in lines[1:-1]] == [
        "commit",
        "launcher's files",
        "plan, optimizer.learning_rate",
        "data key",
    ]
    for node, (_, commit) in enumerate(checkouts):
        assert f"{commit[:12]} on node {node}" in lines[1]
    assert "0.002 on node 0" in lines[3]
    assert "(what differs: data (train), data (validation))" in lines[4]
    assert ended[0].console.count(TITLE) == 1
    (line,) = (line for line in ended[1].console.splitlines() if TITLE in line)
    assert "(commit, launcher's files, plan, optimizer.learning_rate, data key)" in line
    assert "see the console of node 0" in line
    assert len(json.loads(ours.node_facts.read_text())) == 2
    assert not ours.metrics.exists()
    assert not list(tmp_path.rglob("*.arrow")), "nothing is prepared for different nodes"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_equal_nodes_train(harness: Harness, tmp_path: Path, backend: Any) -> None:
    """With c10d the agents have no store for their ranks: rank 0 hosts it."""
    script, commit = make_checkout(tmp_path / "one", "one")
    paths = write_run(harness.plan(CASE), harness.runs, f"preflight-alike-{backend}")
    ended = run_nodes(harness, [script, script], [paths, paths], tmp_path, backend)
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.console for one in ended)
    observed = TrainedRun(paths).outcome.observed
    assert f"commit {commit[:12]}" in observed["nodes"]
    assert "2 equal" in observed["nodes"]
    assert observed["links"].startswith("all-reduce of 4 MiB over 2 ranks in ")
    consoles = "".join(one.console for one in ended)
    assert consoles.count("links: all-reduce of 4 MiB") == 1, "by rank 0 only"
    assert consoles.count("nodes: 2 equal") == 1
    assert "device" in observed
