"""Torch's agent under the supervision of the launcher: exit codes and output of two ranks, a missing node.

Agents are forked, and the training script is a fake one. Other tests of the supervision are in tests/unit/launch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.core.run_paths import RunPaths
from launcher.render import Command
from launcher.runs.record import load_outcome
from tests.distributed.harness import Harness, get_free_port
from tests.faults.fork_server import ForkServer
from tests.unit.standins import PREAMBLE, SHORT_SETTINGS, Arena, make_arena

SHORT = tuple(word for setting in SHORT_SETTINGS for word in ("--set", setting))


@pytest.fixture
def two_ranks(tmp_path: Path) -> Arena:
    """Two ranks under torchelastic's agent, which starts each rank in a new session."""
    return make_arena(tmp_path, num_ranks=2)


def make_command(arena: Arena, script: str) -> Command:
    return Command(argv=arena.write_command(script), environment={})


def test_refusal_of_two_ranks_is_printed_once(fork_server: ForkServer, two_ranks: Arena) -> None:
    ended = fork_server.launch(
        make_command(
            two_ranks,
            """
            if os.environ["RANK"] == "0":
                say("error: three ranks were planned")
                outcome("failed", 5, "three ranks were planned")
            time.sleep(0.5)
            sys.exit(5)
            """,
        )
    )
    assert (ended.returncode, ended.console) == (5, "[default0]:error: three ranks were planned\n")
    assert "ChildFailedError" in two_ranks.log


def test_killed_rank_is_named(fork_server: ForkServer, two_ranks: Arena) -> None:
    ended = fork_server.launch(
        make_command(
            two_ranks,
            """
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
            """,
        )
    )
    assert ended.returncode == 4
    assert "error: the training was killed (SIGKILL)\nhint: " in ended.console


_MAIN = """
import sys
from launcher.launch import start as launch
from launcher.cli.main import main
launch.find_train_script = lambda: sys.argv[1]
sys.exit(main(sys.argv[2:]))
"""


def test_failed_rehearsal_returns_the_trainings_exit_code(fork_server: ForkServer, tmp_path: Path) -> None:
    main, script = tmp_path / "main.py", tmp_path / "script.py"
    main.write_text(_MAIN)
    script.write_text(PREAMBLE + 'say("error: not so")\noutcome("failed", 5, "not so")\nsys.exit(5)\n')
    cluster = ("rehearse", "neo4j", "--gpu", "h100", "--gpus", "8", "--ranks", "2", *SHORT)
    argv = (sys.executable, str(main), str(script), *cluster, "--runs-dir", str(tmp_path / "runs"))
    ended = fork_server.launch(Command(argv=argv, environment={}), LAUNCHER_DATA_DIR=str(tmp_path / "data"))
    assert ended.returncode == 5
    assert "error: not so" in ended.console
    assert "Traceback" not in ended.console
    lines = ended.console.splitlines()
    assert "note: 8 ranks are rehearsed as 2: requested by --ranks" in lines
    assert any(line.startswith("configs differ from the cluster's in: mixed_precision bf16→no") for line in lines)
    assert lines[-2] == "rehearsal failed: ddp on 2 CPU ranks, 3 steps done"
    assert lines[-1].startswith(f"run directory: {tmp_path}/runs/rehearsal-neo4j-")


def test_missing_node_is_named(harness: Harness, fork_server: ForkServer, tmp_path: Path) -> None:
    node = ("--nodes", "2", "--node-rank", "0", "--rendezvous", f"127.0.0.1:{get_free_port()}", "--run-id", "a")
    flags = (*node, "--cpu-ranks", "1", "--cores", "1", *SHORT, "--join-timeout", "2", "--runs-dir", str(tmp_path))
    argv = (sys.executable, "-m", "launcher", "train", "neo4j", *flags)
    ended = fork_server.launch(Command(argv=argv, environment={}), LAUNCHER_DATA_DIR=str(harness.data))
    assert ended.returncode == 4
    assert "the 2 nodes did not all join at 127.0.0.1:" in ended.console
    assert " within 2 s; node 1 did not join\nhint: " in ended.console
    assert "Traceback" not in ended.console
    outcome = load_outcome(RunPaths(tmp_path / "a").outcome)
    assert outcome is not None
    assert outcome.exit_code == 4
