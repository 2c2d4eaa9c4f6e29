"""Exit status of dead ranks, taken from the last output of the agent."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.launch import single_process
from launcher.launch.exit_status import describe_dead_ranks, find_exit_code, is_out_of_memory, make_outcome
from launcher.launch.supervise import ChildExit


def entry(rank: int, code: str) -> str:
    """Return a failure entry as torchelastic prints it, with its line prefixes."""
    return (
        f"[{rank}]:\n  time      : 2026-11-15_07:59:58\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 2000{rank})\n  error_file: <N/A>\n"
    )


def ended(*entries: str) -> ChildExit:
    return ChildExit(
        pid=1, returncode=1, stop_requested=False, was_forced=False, stderr_tail="Failures:\n" + "".join(entries)
    )


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((entry(0, "4"), entry(1, "-9")), "rank 1 (process 20001) died of SIGKILL"),
        ((entry(0, "-15"), entry(1, "-11")), "rank 1 (process 20001) died of SIGSEGV"),  # the agent stopped rank 0
        (
            (entry(0, "-9"), entry(3, "-6")),
            "rank 0 (process 20000) died of SIGKILL, rank 3 (process 20003) died of SIGABRT",
        ),
        ((entry(0, "4"), entry(1, "3")), ""),
    ],
)
def test_dead_ranks_are_named(entries: tuple[str, ...], said: str) -> None:
    assert describe_dead_ranks(ended(*entries)) == said


def test_out_of_memory_is_detected_without_an_outcome(tmp_path: Path) -> None:
    """Rank 0 hung in a collective until its agent killed it, and wrote nothing."""
    ending = ended(entry(0, "-9"), entry(1, "3"))
    assert is_out_of_memory(ending)
    outcome = make_outcome(RunPaths(tmp_path), ending, None, datetime.now(UTC))
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.DOES_NOT_FIT)
    assert "a rank ran out of memory" in outcome.error
    assert not is_out_of_memory(ended(entry(0, "4"), entry(1, "-9")))


def test_single_process_ends_with_the_exit_code_of_the_training() -> None:
    child = ChildExit(pid=1, returncode=3, stop_requested=False, was_forced=False, stderr_tail="")
    assert is_out_of_memory(child)
    assert find_exit_code(child) == 3


def test_killed_training_has_its_steps_and_the_command_that_continues_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "a b")
    paths.root.mkdir(parents=True)
    rows = ({"step": step, "epoch": 0.1, "values": {"train/loss": 1 / step}, "packs": [0]} for step in (1, 2, 3))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    paths.metrics.write_text(
        text + '{"step": 3, "epoch": 0.1, "values": {"eval/loss": 9}, "packs": []}\n{"step": 4, "ep'
    )
    child = ChildExit(pid=1, returncode=-9, stop_requested=False, was_forced=False, stderr_tail="")
    outcome = make_outcome(paths, child, None, datetime.now(UTC))
    assert (outcome.status, outcome.steps_done, outcome.final_loss) == ("crashed", 3, 1 / 3)
    assert f"`launcher train --resume 'a b' --runs-dir {tmp_path}/runs` continues the run" in outcome.error


def test_single_process_that_is_killed_leaves_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    command = (sys.executable, "-I", "-S", single_process.__file__, "--config_file", "none", str(script))
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (137, "the training process died with <Signals.SIGKILL: 9>\n")
    child = ChildExit(pid=1, returncode=137, stop_requested=False, was_forced=False, stderr_tail=ran.stderr)
    outcome = make_outcome(RunPaths(tmp_path), child, None, datetime.now(UTC))
    assert outcome.error.startswith("the training was killed (SIGKILL)")


def test_refused_start_keeps_its_exit_code(tmp_path: Path) -> None:
    outcome = make_outcome(RunPaths(tmp_path), ended(entry(0, "2")), None, datetime.now(UTC))
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.WRONG_INPUT)
    assert "ended before its first step: see its message above" in outcome.error
