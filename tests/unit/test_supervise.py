"""A run from its start to its last process: exit codes, whose words are shown, signals, and nothing left behind.

Where accelerate itself does not matter a stand-in takes its place, which starts the script without seconds of imports.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.standins import Arena, finish, is_alive, make_arena, wait_until

# Counts its SIGUSR1s, ends as stopped. A real training does the same after its step.
POLITE = """
    stop = []
    def handle(number, frame):
        note(signal.Signals(number).name)
        stop.append(number)
    signal.signal(signal.SIGUSR1, handle)
    outcome("running")
    note("ready")
    while not stop:
        time.sleep(0.02)
    time.sleep(0.5)
    say("stopped after step 3")
    outcome("stopped", 75)
    sys.exit(75)
"""


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = make_arena(tmp_path)
    yield arena
    arena.close()


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Arena]:
    """Under torch's agent, which puts each rank into a session of its own."""
    arena = make_arena(tmp_path, num_ranks=2)
    yield arena
    arena.close()


def test_a_run_that_is_done(arena: Arena) -> None:
    result = arena.run(
        """
        print("to stdout")
        say("50%\\rdone")
        outcome("done", 0)
        """,
        real=True,
    )
    assert (result.code, result.stdout, result.stderr) == (0, "to stdout\n", "50%\rdone\n")
    assert arena.outcome.status == "done"
    # Two streams meet in one log: a line's end may be written after what the other one says.
    assert sorted(arena.log.replace("\r", "\n")) == sorted("to stdout\n50%\ndone\n")
    assert all(word in arena.log for word in ("50%", "done", "to stdout"))


def test_a_refusal_is_told_once_and_keeps_its_code(arena: Arena) -> None:
    result = arena.run(
        """
        say("error: two ranks were planned")
        outcome("failed", 5, "two ranks were planned")
        sys.exit(5)
        """,
        real=True,
    )
    assert (result.code, result.stderr) == (5, "error: two ranks were planned\n")
    assert "CalledProcessError" in arena.log, "or there was nothing to hide"


def test_a_refusal_of_two_ranks_is_told_once(two_ranks: Arena) -> None:
    result = two_ranks.run(
        """
        if os.environ["RANK"] == "0":
            say("error: three ranks were planned")
            outcome("failed", 5, "three ranks were planned")
        time.sleep(0.5)
        sys.exit(5)
        """,
        real=True,
    )
    assert (result.code, result.stderr) == (5, "[default0]:error: three ranks were planned\n")
    assert "ChildFailedError" in two_ranks.log


def test_a_killed_rank(two_ranks: Arena) -> None:
    result = two_ranks.run(
        """
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """,
        real=True,
    )
    assert result.code == 4
    assert "error: the training was killed (SIGKILL)\nhint: " in result.stderr


def test_a_signal_reaches_every_rank(two_ranks: Arena) -> None:
    process = two_ranks.start(POLITE.replace("outcome(", "os.environ['RANK'] == '0' and outcome("), real=True)
    wait_until(lambda: two_ranks.notes == ["ready", "ready"])
    os.kill(process.pid, signal.SIGUSR1)
    result = finish(process)
    assert result.code == 75
    assert two_ranks.notes == ["ready", "ready", "SIGUSR1", "SIGUSR1"]
    assert "Traceback" not in result.stderr


def test_a_killed_training_has_crashed(arena: Arena) -> None:
    result = arena.run(
        """
        outcome("running")
        say("step 3")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        real=True,
    )
    assert result.code == 4
    assert result.stderr.startswith("step 3\n")
    error = "the training was killed (SIGKILL)\nhint: usually the kernel's OOM killer"
    assert f"error: {error}" in result.stderr
    assert str(arena.paths.console_log) in result.stderr
    outcome = arena.outcome
    assert (outcome.status, outcome.exit_code, outcome.steps_done, outcome.started_at) == ("crashed", 4, 3, "t")
    assert outcome.error.startswith(error)
    assert outcome.ended_at is not None


def test_the_traceback_of_a_crash_is_shown(arena: Arena) -> None:
    result = arena.run("import nothing_of_this_name", real=True)
    assert result.code == 4
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in result.stderr
    assert "error: the training ended with exit code 1 and left no outcome\nhint: its log is " in result.stderr
    assert arena.outcome.status == "crashed"


def test_one_signal_is_passed_on_once(arena: Arena) -> None:
    """Sent at once, while accelerate is still importing and nobody listens: it is not lost."""
    process = arena.start(POLITE, real=True)
    wait_until(arena.paths.console_log.exists)
    os.kill(process.pid, signal.SIGTERM)
    result = finish(process)
    assert result.code == 75
    assert arena.notes == ["ready", "SIGUSR1"]
    assert result.stderr == ("stopping after this step (signal again to stop at once)\nstopped after step 3\n")
    assert arena.outcome.status == "stopped"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_every_stop_signal_means_the_same(arena: Arena, number: signal.Signals) -> None:
    process = arena.start(POLITE)
    arena.wait_for_note("ready")
    os.kill(process.pid, number)
    assert finish(process).code == 75
    assert arena.notes == ["ready", "SIGUSR1"]


def test_a_terminal_that_closes_may_tell_so_twice(arena: Arena) -> None:
    process = arena.start(POLITE)
    arena.wait_for_note("ready")
    os.kill(process.pid, signal.SIGHUP)
    arena.wait_for_note("SIGUSR1")
    os.kill(process.pid, signal.SIGHUP)
    result = finish(process)
    assert result.code == 75
    assert result.stderr.endswith("stopped after step 3\n")
    assert arena.notes == ["ready", "SIGUSR1"]


def test_two_signals_stop_what_does_not_listen(arena: Arena) -> None:
    process = arena.start(
        """
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, frame: note(signal.Signals(number).name))
        helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
        note(f"{os.getpid()} {os.getppid()} {helper.pid}")
        note("ready")
        while True:
            time.sleep(0.02)
        """,
        kill=3,
    )
    arena.wait_for_note("ready")
    pids = [int(pid) for pid in arena.notes[0].split()]
    os.kill(process.pid, signal.SIGINT)
    arena.wait_for_note("SIGUSR1")
    assert all(map(is_alive, pids))
    started = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    result = finish(process)
    assert 3 <= time.monotonic() - started < 5.5, "SIGTERM first, and time to obey it"
    assert result.code == 75
    assert arena.notes[2:] == ["SIGUSR1", "SIGTERM"]
    assert not any(map(is_alive, pids))
    assert arena.outcome.status == "stopped"
    assert "stopping at once\n" in result.stderr
    assert "error: the training was stopped at once: what it did since its last checkpoint is lost\n" in result.stderr


def test_a_training_that_only_starts_is_stopped_at_once(arena: Arena) -> None:
    """It ignores SIGTERM as it was started to: nobody waits for it to listen."""
    process = arena.start("note(str(os.getpid())); note('ready'); time.sleep(600)", kill=60)
    arena.wait_for_note("ready")
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.3)
    started = time.monotonic()
    assert finish(process).code == 75
    assert time.monotonic() - started < 10
    assert not is_alive(int(arena.notes[0]))


def test_nothing_is_left_behind(arena: Arena) -> None:
    """A helper in a session of its own, as torch's agent and wandb start theirs."""
    result = arena.run(
        """
        helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
        note(str(helper.pid))
        outcome("done", 0)
        """,
        leftover=0.5,
    )
    assert result.code == 0
    assert not is_alive(int(arena.notes[0]))


def test_a_training_whose_agent_was_killed_may_save(arena: Arena) -> None:
    process = arena.start("note(str(os.getppid()))" + POLITE.replace("\n    ", "\n"))
    arena.wait_for_note("ready")
    os.kill(int(arena.notes[0]), signal.SIGKILL)
    result = finish(process)
    assert result.code == 75
    assert arena.notes[1:] == ["ready", "SIGUSR1"]
    assert "the agent of this training was killed: stopping after this step\n" in result.stderr


def test_a_traceback_of_a_run_that_goes_on_is_shown_while_it_does(arena: Arena) -> None:
    process = arena.start(
        """
        outcome("running")
        say("Traceback (most recent call last):\\nOSError: a warning")
        deadline = time.monotonic() + 8
        while not (paths.root / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        note("in time" if time.monotonic() < deadline else "too late")
        outcome("done", 0)
        """,
        held=0.3,
    )
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    assert lines == [b"Traceback (most recent call last):\n", b"OSError: a warning\n"]
    (arena.paths.root / "go").touch()
    result = finish(process)
    assert (result.code, result.stderr, arena.notes) == (0, "", ["in time"])


def test_the_environment_of_the_child(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_TERMINAL", "stale")
    names = ("LAUNCHER_PID", "LAUNCHER_TERMINAL", "COLUMNS", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS")
    script = f"""
        [note(str(os.environ.get(name))) for name in {names!r}]
        note(str([signal.getsignal(number) == signal.SIG_IGN for number in (2, 15, 10)]))
        note(str(os.getsid(0) == os.getppid()))
        note(repr(sys.stdin.read()))
        outcome("done", 0)
    """
    process = arena.start(script, columns="77")
    assert finish(process).code == 0
    pid, terminal, columns, use_cpu, threads, ignored, own_session, stdin = arena.notes
    assert (pid, terminal, columns, use_cpu) == (str(process.pid), "1", "77", "1")
    assert int(threads) >= 1
    assert (ignored, own_session, stdin) == ("[True, True, True]", "True", "''")
    (arena.paths.root / "notes.txt").unlink()
    assert arena.run(script).code == 0
    assert arena.notes[1] == "None"


def test_a_full_disk_does_not_change_the_exit_code(arena: Arena) -> None:
    """outcome.json cannot be replaced: a folder of its name stands there."""
    result = arena.run("paths.outcome.mkdir(); sys.exit(1)")
    assert result.code == 4
    assert "error: the training ended with exit code 1" in result.stderr
    assert f"warning: {arena.paths.outcome} cannot be written" in result.stderr


def test_an_end_without_an_outcome_is_a_crash_even_with_code_0(arena: Arena) -> None:
    result = arena.run("outcome('running')")
    assert result.code == 4
    assert "error: the training ended with exit code 0 and left no outcome" in result.stderr
    assert arena.outcome.status == "crashed"
