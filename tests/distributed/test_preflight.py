"""Two nodes on the loopback interface, each with a checkout of its own: unlike ones end before anything is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from launcher.errors import ExitCode
from launcher.launch import ACCELERATE, write_run
from launcher.paths import RunPaths
from launcher.render import Rendezvous, render_command
from tests.conftest import ROOT
from tests.distributed.bench import Bench, Cell, Ended, Trained, find_port
from tests.training.builders import vary

CELL = Cell(strategy="ddp", ranks_per_node=1, nodes=2)
TITLE = "the nodes cannot train together"


def make_checkout(folder: Path, remark: str) -> tuple[Path, str]:
    """The package, committed anew: the training script, and the commit."""
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
    bench: Bench, scripts: list[Path], runs: list[RunPaths], data: Path, backend: Literal["static", "c10d"] = "static"
) -> list[Ended]:
    planned = bench.plan(CELL)
    port = find_port()
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
    with bench.started(commands[0], **where) as first, bench.started(commands[1], **where) as second:
        return [child.wait(120) for child in (first, second)]


@pytest.mark.slow
def test_another_commit_plan_and_data_on_the_second_node(bench: Bench, tmp_path: Path) -> None:
    """All differences at once, on the first node's console; the second says one line, and both end alike."""
    checkouts = [make_checkout(tmp_path / name, name) for name in ("one", "other")]
    planned = bench.plan(CELL)
    ours = write_run(planned, bench.runs, "preflight-one")
    folder = tmp_path / "rows"
    folder.mkdir()
    for file in bench.folder.glob("*.jsonl"):
        (folder / file.name).write_text(file.read_text().replace("?", "!"))
    changed = vary(planned.plan, {"optimizer.learning_rate": 0.5, "data.folder": str(folder)})
    theirs = write_run(replace(planned, plan=changed), bench.runs, "preflight-other")
    ended = run_nodes(bench, [script for script, _ in checkouts], [ours, theirs], tmp_path)
    outcome = Trained(ours).outcome
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.WRONG_TOPOLOGY), ended[0].console
    for one in ended:
        assert "exitcode  : 5" in one.console, one.console
        assert "Traceback" not in one.console.partition("torch/distributed/elastic")[0]
    said = outcome.error.splitlines()
    assert said[0] == TITLE
    assert [line.split(": ")[0].strip() for line in said[1:-1]] == [
        "commit",
        "launcher's files",
        "plan, optimizer.learning_rate",
        "data key",
    ]
    for node, (_, commit) in enumerate(checkouts):
        assert f"{commit[:12]} on node {node}" in said[1]
    assert "0.002 on node 0" in said[3]
    assert "(what differs: data (train), data (validation))" in said[4]
    assert ended[0].console.count(TITLE) == 1
    (line,) = (line for line in ended[1].console.splitlines() if TITLE in line)
    assert "(commit, launcher's files, plan, optimizer.learning_rate, data key)" in line
    assert "the console of node 0" in line
    assert len(json.loads(ours.node_facts.read_text())) == 2
    assert not ours.metrics.exists()
    assert not list(tmp_path.rglob("*.arrow")), "nothing is prepared for nodes that do not go together"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_the_same_commit_on_both_nodes(bench: Bench, tmp_path: Path, backend: Any) -> None:
    """Under c10d the agents keep no store for their ranks: the first rank does."""
    script, commit = make_checkout(tmp_path / "one", "one")
    paths = write_run(bench.plan(CELL), bench.runs, f"preflight-alike-{backend}")
    ended = run_nodes(bench, [script, script], [paths, paths], tmp_path, backend)
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.console for one in ended)
    observed = Trained(paths).outcome.observed
    assert f"commit {commit[:12]}" in observed["nodes"]
    assert "2 alike" in observed["nodes"]
    assert observed["links"].startswith("all-reduce of 4 MiB over 2 ranks in ")
    consoles = "".join(one.console for one in ended)
    assert consoles.count("links: all-reduce of 4 MiB") == 1, "by the first rank alone"
    assert consoles.count("nodes: 2 alike") == 1
    assert "device" in observed
