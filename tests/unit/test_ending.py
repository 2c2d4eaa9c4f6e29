"""What the agent's last words tell of ranks that could not speak for themselves."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.ending import make_outcome, name_dead_ranks, tells_out_of_memory
from launcher.errors import ExitCode
from launcher.paths import RunPaths
from launcher.supervise import Ending


def entry(rank: int, code: str) -> str:
    """As torch prints it, behind the marks that it puts before lines."""
    return (
        f"[{rank}]:\n  time      : 2026-11-15_07:59:58\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 2000{rank})\n  error_file: <N/A>\n"
    )


def ended(*entries: str) -> Ending:
    return Ending(pid=1, returncode=1, was_asked=False, was_forced=False, stderr_tail="Failures:\n" + "".join(entries))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((entry(0, "4"), entry(1, "-9")), "rank 1 (process 20001) died of SIGKILL"),
        ((entry(0, "-15"), entry(1, "-11")), "rank 1 (process 20001) died of SIGSEGV"),  # the agent ended the other
        (
            (entry(0, "-9"), entry(3, "-6")),
            "rank 0 (process 20000) died of SIGKILL, rank 3 (process 20003) died of SIGABRT",
        ),
        ((entry(0, "4"), entry(1, "3")), ""),
    ],
)
def test_the_dead_are_named(entries: tuple[str, ...], said: str) -> None:
    assert name_dead_ranks(ended(*entries)) == said


def test_a_rank_out_of_memory_is_known_without_a_record(tmp_path: Path) -> None:
    """Rank 0 hung in a collective until its agent killed it, and wrote nothing."""
    ending = ended(entry(0, "-9"), entry(1, "3"))
    assert tells_out_of_memory(ending)
    outcome = make_outcome(RunPaths(tmp_path), ending, None, datetime.now(UTC))
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.DOES_NOT_FIT)
    assert "a rank ran out of memory" in outcome.error
    assert not tells_out_of_memory(ended(entry(0, "4"), entry(1, "-9")))


def test_a_start_that_was_refused_keeps_its_code(tmp_path: Path) -> None:
    outcome = make_outcome(RunPaths(tmp_path), ended(entry(0, "2")), None, datetime.now(UTC))
    assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.WRONG_INPUT)
    assert "ended before it began: see its message above" in outcome.error
