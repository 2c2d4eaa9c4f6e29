"""Child processes: lines under a deadline, commands under a timeout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.core.worker import Worker, WorkerError, WorkerFailure, run_command

pytestmark = pytest.mark.process

ECHO = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"


def start_python(code: str) -> Worker:
    return Worker([sys.executable, "-c", code])


@pytest.fixture
def echo() -> Iterator[Worker]:
    worker = start_python(ECHO)
    yield worker
    worker.close()


def test_worker_replies_to_each_line(echo: Worker) -> None:
    assert [echo.request(line, 20.0) for line in ("one", "two", "x" * 500_000)] == ["ONE", "TWO", "X" * 500_000]


def test_worker_is_killed_with_its_children_on_close() -> None:
    worker = start_python("import os, time\npid = os.fork()\nprint(pid, flush=True) if pid else None\ntime.sleep(60)")
    child = int(worker.read_line(20.0))
    worker.close()
    assert not worker.is_alive()
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the grandchild is still alive")


def test_worker_that_ends_with_its_stdin_is_not_killed(echo: Worker) -> None:
    echo.request("one", 20.0)
    echo.close(seconds_to_exit=20.0)
    assert echo._process.returncode == 0


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        ("import time; time.sleep(60)", WorkerFailure.TIMEOUT, "timed out after 0.5 s"),
        ("raise SystemExit(3)", WorkerFailure.EXITED, "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", WorkerFailure.EXITED, "was killed by signal 9"),
        ("while True: print('x' * 100_000, end='')", WorkerFailure.OUTPUT_LIMIT, "wrote more than 32 MiB"),
    ],
)
def test_missing_reply_has_a_reason(code: str, reason: WorkerFailure, message: str) -> None:
    worker = start_python(code)
    try:
        with pytest.raises(WorkerError, match=message) as raised:
            worker.read_line(0.5 if reason is WorkerFailure.TIMEOUT else 60.0)
    finally:
        worker.close()
    assert raised.value.reason is reason


def test_input_that_is_not_read_times_out() -> None:
    worker = start_python("import time; time.sleep(60)")
    try:
        with pytest.raises(WorkerError, match=r"timed out after 0\.5 s"):
            worker.write_line("x" * 2**20, 0.5)
    finally:
        worker.close()


def test_command_returns_its_output_and_exit_code() -> None:
    code = "import sys; print(sys.stdin.read()); print('e', file=sys.stderr); sys.exit(4)"
    result = run_command([sys.executable, "-c", code], timeout=60.0, input_text="hello")
    assert (result.returncode, result.stdout, result.stderr) == (4, "hello\n", "e\n")


def test_command_that_hangs_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"timed out after 0\.5 s") as raised:
        run_command(["sleep", "60"], timeout=0.5)
    assert raised.value.reason is WorkerFailure.TIMEOUT
    assert time.monotonic() - start < 55


def test_command_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="is not installed") as raised:
        run_command(["no-such-program"], timeout=1.0)
    assert raised.value.reason is WorkerFailure.NOT_FOUND
    file = tmp_path / "not_executable"
    file.write_text("")
    file.chmod(0o644)
    with pytest.raises(WorkerError, match="cannot be started: Permission denied") as raised:
        run_command([str(file)], timeout=1.0)
    assert raised.value.reason is WorkerFailure.NOT_STARTED
