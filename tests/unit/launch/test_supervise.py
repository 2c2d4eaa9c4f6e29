"""Supervision of a run from start to last process: exit codes, output, signals, and no processes left running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.standins import Arena, finish, is_alive, make_arena, wait_until

pytestmark = pytest.mark.process

# Counts SIGUSR1 signals and ends as stopped, as a real training does after its current step.
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

SIGNAL_BEFORE_LOG = """
    import os, signal
    import launcher.launch.start as start
    open_relay = start._open_relay
    def open_late(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return open_relay(*arguments)
    start._open_relay = open_late
"""


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = make_arena(tmp_path)
    yield arena
    arena.close()


def test_finished_run_is_done(arena: Arena) -> None:
    result = arena.run(
        """
        print("to stdout")
        say("50%\\rdone")
        outcome("done", 0)
        """,
    )
    assert (result.code, result.stdout, result.stderr) == (0, "to stdout\n", "50%\rdone\n")
    assert arena.outcome.status == "done"
    # Both streams go to one log: a line may end after output of the other stream.
    assert sorted(arena.log.replace("\r", "\n")) == sorted("to stdout\n50%\ndone\n")
    assert all(word in arena.log for word in ("50%", "done", "to stdout"))


def test_refusal_is_printed_once_and_keeps_its_exit_code(arena: Arena) -> None:
    result = arena.run(
        """
        say("error: two ranks were planned")
        outcome("failed", 5, "two ranks were planned")
        sys.exit(5)
        """,
    )
    assert (result.code, result.stderr) == (5, "error: two ranks were planned\n")
    assert arena.log == result.stderr, "without a traceback of the process that started it"


def test_signal_reaches_every_rank(tmp_path: Path) -> None:
    """Two ranks under torchelastic's agent, which starts each rank in a new session; tests/faults forks it."""
    two_ranks = make_arena(tmp_path, num_ranks=2)
    process = two_ranks.start(POLITE.replace("outcome(", "os.environ['RANK'] == '0' and outcome("))
    try:
        wait_until(lambda: two_ranks.notes == ["ready", "ready"])
        os.kill(process.pid, signal.SIGUSR1)
        result = finish(process)
    finally:
        two_ranks.close()
    assert result.code == 75
    assert two_ranks.notes == ["ready", "ready", "SIGUSR1", "SIGUSR1"]
    assert "Traceback" not in result.stderr


def test_killed_training_is_a_crash(arena: Arena) -> None:
    result = arena.run(
        """
        outcome("running")
        say("step 3")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
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


def test_traceback_of_a_crash_is_shown(arena: Arena) -> None:
    result = arena.run("import nothing_of_this_name")
    assert result.code == 4
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in result.stderr
    assert "the training ended with exit code 1 without recording its outcome\nhint: its log is " in result.stderr
    assert arena.outcome.status == "crashed"


def test_stop_signal_is_forwarded_once(arena: Arena) -> None:
    """A signal that arrives before the console log exists, and before the training handles it, is not lost."""
    result = finish(arena.start(POLITE, before=SIGNAL_BEFORE_LOG))
    assert result.code == 75
    assert sorted(arena.notes) == ["SIGUSR1", "ready"]
    assert result.stderr == ("stopping after this step (signal again to stop at once)\nstopped after step 3\n")
    assert "Traceback" not in arena.log
    assert arena.outcome.status == "stopped"


# The others are tested with two ranks and with a second SIGHUP, too.
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGUSR1, signal.SIGHUP))],
)
def test_every_stop_signal_stops_gracefully(arena: Arena, number: signal.Signals) -> None:
    process = arena.start(POLITE)
    arena.wait_for_note("ready")
    os.kill(process.pid, number)
    assert finish(process).code == 75
    assert arena.notes == ["ready", "SIGUSR1"]


def test_second_sighup_does_not_force_a_stop(arena: Arena) -> None:
    process = arena.start(POLITE)
    arena.wait_for_note("ready")
    os.kill(process.pid, signal.SIGHUP)
    arena.wait_for_note("SIGUSR1")
    os.kill(process.pid, signal.SIGHUP)
    result = finish(process)
    assert result.code == 75
    assert result.stderr.endswith("stopped after step 3\n")
    assert arena.notes == ["ready", "SIGUSR1"]


def test_second_signal_kills_unresponsive_processes(arena: Arena) -> None:
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
    assert 3 <= time.monotonic() - started < 60, "SIGTERM first, and time to obey it"
    assert result.code == 75
    assert arena.notes[2:] == ["SIGUSR1", "SIGTERM"]
    assert not any(map(is_alive, pids))
    assert arena.outcome.status == "stopped"
    assert "stopping at once\n" in result.stderr
    assert "error: the training was stopped at once: progress since its last checkpoint is lost\n" in result.stderr


def test_starting_training_is_stopped_at_once(arena: Arena) -> None:
    """The child inherits an ignored SIGTERM; the launcher does not wait for its handler."""
    process = arena.start("note(str(os.getpid())); note('ready'); time.sleep(600)", kill=60)
    arena.wait_for_note("ready")
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.3)
    started = time.monotonic()
    assert finish(process).code == 75
    assert time.monotonic() - started < 50
    assert not is_alive(int(arena.notes[0]))


def test_no_process_is_left_running(arena: Arena) -> None:
    """Includes a helper in a new session, as started by torchelastic and wandb."""
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


def test_training_of_a_killed_agent_can_save(arena: Arena) -> None:
    process = arena.start("note(str(os.getppid()))" + POLITE.replace("\n    ", "\n"))
    arena.wait_for_note("ready")
    os.kill(int(arena.notes[0]), signal.SIGKILL)
    result = finish(process)
    assert result.code == 75
    assert arena.notes[1:] == ["ready", "SIGUSR1"]
    assert "the agent of this training was killed: stopping after this step\n" in result.stderr


def test_traceback_of_a_continuing_run_is_shown(arena: Arena) -> None:
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


def test_child_environment_is_complete(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (pid, terminal, columns, use_cpu) == (str(process.pid), "1", "77", "True")
    assert int(threads) >= 1
    assert (ignored, own_session, stdin) == ("[True, True, True]", "True", "''")
    (arena.paths.root / "notes.txt").unlink()
    assert arena.run(script).code == 0
    assert arena.notes[1] == "None"


def test_full_disk_does_not_change_the_exit_code(arena: Arena) -> None:
    """outcome.json cannot be replaced, because a folder has its name."""
    result = arena.run("paths.outcome.mkdir(); sys.exit(1)")
    assert result.code == 4
    assert "error: the training ended with exit code 1" in result.stderr
    assert f"warning: {arena.paths.outcome} cannot be written" in result.stderr


def test_exit_without_an_outcome_is_a_crash_even_with_code_0(arena: Arena) -> None:
    result = arena.run("outcome('running')")
    assert result.code == 4
    assert "error: the training ended with exit code 0 without recording its outcome" in result.stderr
    assert arena.outcome.status == "crashed"
