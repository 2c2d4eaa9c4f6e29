"""Child processes and calls under a timeout: exchange lines, run a command to completion, call a function."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import IO, Literal, TypeVar

MAX_LINE_BYTES = 32 * 2**20
_CHUNK_BYTES = 2**16
_POLL_SECONDS = 0.02
_SECONDS_AFTER_KILL = 5.0  # a process that hangs inside the kernel cannot be killed


class WorkerFailure(StrEnum):
    """Why a child process gave no result."""

    NOT_FOUND = "not found"
    NOT_STARTED = "not started"
    TIMEOUT = "timeout"
    EXITED = "exited"
    OUTPUT_LIMIT = "output limit"


class WorkerError(Exception):
    """A child process gave no result.

    The message is a predicate without a subject ("timed out after 5 s"), so that callers can name the process.
    """

    def __init__(self, reason: WorkerFailure, message: str, returncode: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.returncode = returncode


def start_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = subprocess.DEVNULL,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child process in its own session, so that signals of our terminal do not reach it.

    Raises WorkerError if it cannot be started.
    """
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=None if environment is None else dict(environment),
            cwd=cwd,
            start_new_session=True,
            bufsize=0,
        )
    except FileNotFoundError:
        raise WorkerError(WorkerFailure.NOT_FOUND, "is not installed") from None
    except OSError as error:
        raise WorkerError(WorkerFailure.NOT_STARTED, f"cannot be started: {error.strerror}") from None


def kill_process_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of start_process with all of its children, and wait for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_AFTER_KILL)


def run_command(
    command: Sequence[str],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    input_text: str = "",
    errors: Literal["replace", "strict"] = "replace",
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion and return its exit code, stdout and the end of stderr.

    Raises WorkerError if it cannot be started, if it times out or writes too much, and UnicodeDecodeError for stdout
    that is not UTF-8 if `errors` is strict. Processes that it started are killed with it.
    """
    pipe = subprocess.PIPE
    process = start_process(command, environment=environment, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        stdout, stderr = _communicate(process, input_text.encode(), _Deadline(timeout))
    finally:
        kill_process_group(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    texts = (stdout.decode("utf-8", errors), stderr.decode("utf-8", "replace"))
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def _communicate(process: subprocess.Popen[bytes], data: bytes, deadline: _Deadline) -> tuple[bytes, bytes]:
    """Write `data` to stdin and return stdout and the end of stderr; kill child processes that outlive the process."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    rest, stdout, stderr = memoryview(data), bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ, stdout)
        selector.register(process.stderr, selectors.EVENT_READ, stderr)
        has_exited = False
        while not (has_exited and not selector.select(0)) and selector.get_map():
            deadline.check()
            if not has_exited and process.poll() is not None:
                has_exited = True
                kill_process_group(process)
            for key, _ in selector.select(0 if has_exited else _POLL_SECONDS):
                if key.data is not None:
                    chunk = os.read(key.fd, _CHUNK_BYTES)
                    key.data.extend(chunk)
                    has_ended = not chunk
                else:
                    try:
                        rest = rest[os.write(key.fd, rest[:_CHUNK_BYTES]) :]
                        has_ended = not rest
                    except BrokenPipeError:
                        has_ended = True
                if has_ended:
                    selector.unregister(key.fileobj)
                    if key.data is None:
                        process.stdin.close()
            del stderr[:-_CHUNK_BYTES]
            if len(stdout) > MAX_LINE_BYTES:
                raise WorkerError(WorkerFailure.OUTPUT_LIMIT, f"wrote more than {MAX_LINE_BYTES // 2**20} MiB")
        while process.poll() is None:  # it has closed its output
            deadline.check()
            time.sleep(_POLL_SECONDS)
    return bytes(stdout), bytes(stderr)


class _Deadline:
    """A deadline, and the timeout in seconds that it was computed from."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    @classmethod
    def of(cls, limit: float | _Deadline) -> _Deadline:
        return limit if isinstance(limit, _Deadline) else cls(limit)

    def wait(self, selector: selectors.BaseSelector) -> None:
        if not selector.select(max(0.0, self._end - time.monotonic())):
            raise self._make_error()

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise self._make_error()

    def _make_error(self) -> WorkerError:
        return WorkerError(WorkerFailure.TIMEOUT, f"timed out after {self._seconds:g} s")


class Worker:
    """A child process that exchanges lines of text with us over its stdin and stdout.

    Every exchange has a deadline. After a WorkerError the process may still be alive: call `kill` or `close`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
    ) -> None:
        """Start the process; raises WorkerError."""
        pipe = subprocess.PIPE
        self._process = start_process(command, environment=environment, cwd=cwd, stdin=pipe, stdout=pipe, stderr=stderr)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._unread = b""

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def request(self, line: str, seconds: float) -> str:
        """Send a line and return the line that the process replies with; earlier unread output is dropped."""
        self._unread = b""
        deadline = _Deadline(seconds)
        self.write_line(line, deadline)
        return self.read_line(deadline)

    def write_line(self, line: str, limit: float | _Deadline) -> None:
        """Send a line; raises WorkerError if the process does not take it in time."""
        deadline, rest = _Deadline.of(limit), memoryview(line.encode() + b"\n")
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while rest:
                deadline.wait(selector)
                try:
                    rest = rest[os.write(self._stdin.fileno(), rest[:_CHUNK_BYTES]) :]
                except BrokenPipeError:
                    raise self._describe_exit() from None

    def read_line(self, limit: float | _Deadline) -> str:
        """Return the next line without its end; raises WorkerError if none comes in time or if it is too long."""
        deadline, received = _Deadline.of(limit), bytearray(self._unread)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in received[-_CHUNK_BYTES:]:
                deadline.wait(selector)
                chunk = os.read(self._stdout.fileno(), _CHUNK_BYTES)
                if not chunk:
                    raise self._describe_exit()
                received += chunk
                if len(received) > MAX_LINE_BYTES:
                    raise WorkerError(WorkerFailure.OUTPUT_LIMIT, f"wrote more than {MAX_LINE_BYTES // 2**20} MiB")
        line, _, self._unread = bytes(received).partition(b"\n")
        return line.decode("utf-8", "replace")

    def kill(self) -> None:
        """Kill the process with all of its children."""
        kill_process_group(self._process)

    def close(self, seconds_to_exit: float = 0.0) -> None:
        """Close the process's stdin, give the process some time to exit, and kill it if it has not."""
        self._stdin.close()
        if seconds_to_exit:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds_to_exit)
        if self.is_alive():
            self.kill()
        self._stdout.close()

    def _describe_exit(self) -> WorkerError:
        """Wait for the exit code of a process whose output has ended, and return the error."""
        try:
            code = self._process.wait(_SECONDS_AFTER_KILL)
        except subprocess.TimeoutExpired:
            self.kill()
            return WorkerError(WorkerFailure.EXITED, "closed its output")
        how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        return WorkerError(WorkerFailure.EXITED, how, code)


Value = TypeVar("Value")


def call_with_timeout(action: Callable[[], Value], seconds: float) -> Value:
    """Return the result of `action`, run in a daemon thread; after `seconds`, abandon it and raise TimeoutError."""
    future: Future[Value] = Future()

    def act() -> None:
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"timed out after {seconds:g} s") from None
