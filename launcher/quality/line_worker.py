"""A child process that answers a line of JSON with another: killed when it is late, started anew when it is gone."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import RunFailedError

_MAX_REPLY_BYTES = 32 * 2**20  # more is a flood
_SECONDS_TO_START = 60.0
# A shell sets what the child may use before it becomes the child: no core file, no byte in any file, so much data.
_BOUNDED = 'ulimit -c 0 && ulimit -f 0 && ulimit -d "$0" && exec "$@"'
_SHELL = "/bin/sh"


_ROOT = Path(__file__).resolve().parents[2]  # where `launcher` is imported from


class WorkerGoneError(Exception):
    """No reply: what was asked took too long, took too much memory, or ended the child."""


class LineWorker:
    """The child says that it is ready by one line; from then on it gives one line for each that it gets."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, seconds: float, memory_mib: int
    ) -> None:
        self._command = [_SHELL, "-c", _BOUNDED, str(memory_mib * 1024), *command]
        self._program = Path(command[0]).name
        self._environment = dict(environment)
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def ask(self, request: str, *, is_final: bool = True) -> str:
        """Raises WorkerGoneError. What an earlier request left behind in the child is not the fault of this one, which
        is asked again where it was not the first; unless nothing hangs on it, since its parts are asked one by one."""
        is_fresh = self._process is None
        try:
            return self._ask_once(request)
        except WorkerGoneError:
            if is_fresh or not is_final:
                raise
        return self._ask_once(request)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.wait()

    def _ask_once(self, request: str) -> str:
        process = self._process or self._start()
        deadline = time.monotonic() + self.seconds
        self._received = b""  # nothing was asked for it
        try:
            self._send(process, request.encode() + b"\n", deadline)
            return self._receive(process, deadline).decode()
        except (WorkerGoneError, OSError, ValueError) as error:
            self.close()
            reason = str(error) if isinstance(error, WorkerGoneError) else "ended the process that looked at it"
            raise WorkerGoneError(reason) from None

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            cwd="/",
            start_new_session=True,
        )
        self._process, self._received = process, b""
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        try:
            self._receive(process, time.monotonic() + _SECONDS_TO_START)
        except WorkerGoneError:
            self.close()
            raise RunFailedError(
                f"{self._program} cannot be started to judge answers", hint=f"it was: {' '.join(self._command[4:])}"
            ) from None
        return process

    def _send(self, process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
        assert process.stdin is not None
        view = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while view:
                self._wait(selector, deadline)
                view = view[os.write(process.stdin.fileno(), view[: 2**16]) :]

    def _receive(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            received = bytearray(self._received)
            while b"\n" not in received[-(2**16) :]:
                self._wait(selector, deadline)
                part = os.read(process.stdout.fileno(), 2**16)
                if not part:
                    raise WorkerGoneError("ended the process that looked at it")
                received += part
                if len(received) > _MAX_REPLY_BYTES:
                    raise WorkerGoneError("said too much")
        line, _, self._received = bytes(received).partition(b"\n")
        return line

    def _wait(self, selector: selectors.BaseSelector, deadline: float) -> None:
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise WorkerGoneError(f"took longer than {self.seconds:g} s")


def make_python_worker(module: str, *, seconds: float, memory_mib: int) -> LineWorker:
    """A child that runs `serve()` of a module of ours."""
    kept = {key: value for key, value in os.environ.items() if key in {"PATH", "LANG", "PYTHONPATH"}}
    searched = os.pathsep.join(filter(None, (str(_ROOT), kept.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-c", f"from {module} import serve; serve()"]
    return LineWorker(command, kept | {"PYTHONPATH": searched}, seconds=seconds, memory_mib=memory_mib)
