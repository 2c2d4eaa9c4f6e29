"""Relay of the child's output to our console and to the run's log.

accelerate and torch's agent end every failed run with tracebacks of their own, below the message that the training has
already printed. stderr therefore goes through a gate, which holds back a traceback until it is known whether the
training has reported the error itself.
"""

from __future__ import annotations

import errno
import os
import re
import select
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launcher.core.run_files import open_log

# A traceback, or a message of torch's agent. Possible prefixes: escape codes that clear a progress bar, and the rank,
# from torch's --tee and from torch.
_NOISE = re.compile(
    rb"(?:\x1b\[[0-9;?]*[A-Za-z])*(?:\[[A-Za-z_]+\d+\]: ?)*"
    rb"(?:Traceback \(most recent call last\):|[WEF]\d{4} \d\d:\d\d:\d\d\S* +\d+ +\S*torch/distributed/elastic/)"
)
_AFTER_LINE_END = re.compile(rb"(?<=[\r\n])")

_PARTIAL_LINE_SECONDS = 0.2
_UNENDED_LINE_SECONDS = 2.0  # Python writes the line break separately, on a busy machine some time later
_CHUNK_BYTES = 65536
_TAIL_BYTES = 65536


class Gate:
    """Filter of a stderr stream that holds back all output from the first line of a traceback on.

    Whether to hold back a line is decided when it is complete; its start is kept until then, or until flush().
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._held_since: float | None = None
        self._partial = b""
        self._is_line_start = True  # False: the start of this line has been shown

    @property
    def has_partial(self) -> bool:
        """Whether the start of an unfinished line is held back; call flush() if it does not end soon."""
        return bool(self._partial)

    @property
    def held_seconds(self) -> float:
        """Return for how many seconds output has been held back; 0 if none is."""
        return 0.0 if self._held_since is None else time.monotonic() - self._held_since

    def feed(self, data: bytes) -> bytes:
        """Add the next bytes of the stream, and return those that can be shown now."""
        if self._held_since is not None:
            self._held += data
            return b""
        *lines, self._partial = _AFTER_LINE_END.split(self._partial + data)
        for number, line in enumerate(lines):
            if self._is_line_start and _NOISE.match(line):
                self._held += b"".join(lines[number:]) + self._partial
                self._held_since, self._partial = time.monotonic(), b""
                return b"".join(lines[:number])
            self._is_line_start = True
        return b"".join(lines)

    def flush(self) -> bytes:
        """Return the kept start of an unfinished line, to show it without waiting for the line's end."""
        partial, self._partial = self._partial, b""
        self._is_line_start = self._is_line_start and not partial
        return partial

    def release(self) -> bytes:
        """Return all output that is held back, and stop holding back."""
        text = self.flush() + bytes(self._held)
        self._held.clear()
        self._held_since = None
        self._is_line_start = not text or text[-1:] in b"\r\n"
        return text


class _Sink:
    """An output stream that stores its first error (closed terminal, full disk) and ignores all later writes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.error: OSError | None = None

    def write(self, data: bytes) -> None:
        with self._lock:
            if self.error is not None or not data:
                return
            try:
                self._stream.write(data)
                self._stream.flush()
            except OSError as error:
                self.error = error

    def close(self) -> None:
        with self._lock:
            self.error = self.error or OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._stream.close()


class _Lines:
    """Line buffer between a stream and the log, so that lines of stdout and stderr do not mix."""

    def __init__(self, log: _Sink) -> None:
        self._log = log
        self._unended = b""

    @property
    def has_unended(self) -> bool:
        return bool(self._unended)

    def write(self, data: bytes) -> None:
        data = self._unended + data
        end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r"))
        self._log.write(data[:end])
        self._unended = data[end:]
        if len(self._unended) > _CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        self._log.write(self._unended)
        self._unended = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Console:
    """Destinations of the training's stdout and stderr; both are our stderr if our stdout is for JSON."""

    stdout: IO[bytes]
    stderr: IO[bytes]
    columns: int | None = None  # None if stderr is not a terminal


class Relay:
    """Threads that copy the training's stdout and stderr to the console and to one log, from start() to finish()."""

    def __init__(self, console: Console, log: Path) -> None:
        self._log_path = log
        self._log = _Sink(open_log(log))
        self._stdout, self._stderr = _Sink(console.stdout), _Sink(console.stderr)
        self._is_terminal = console.columns is not None
        self._gate = Gate()
        self._gate_lock = threading.Lock()
        self._tail = bytearray()
        self._pumps: list[threading.Thread] = []

    @property
    def tail(self) -> str:
        """The end of the child's stderr, at most 64 KiB, whether printed or still held back."""
        with self._gate_lock:
            return self._tail.decode("utf-8", "replace")

    def start(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Start reading the child's pipes."""
        for target, pipe in ((self._pump_stdout, stdout), (self._pump_stderr, stderr)):
            pump = threading.Thread(target=target, args=(pipe.fileno(),), daemon=True)
            pump.start()
            self._pumps.append(pump)

    def log(self, line: str) -> None:
        """Write a message of the launcher to stderr and to the log, after clearing a progress bar of the training."""
        data = f"{line}\n".encode(errors="replace")
        self._log.write(data)
        self._stderr.write((b"\r\x1b[K" if self._is_terminal else b"") + data)

    def held_seconds(self) -> float:
        """Return for how many seconds a traceback has not been shown yet; 0 if none is waiting."""
        with self._gate_lock:
            return self._gate.held_seconds

    def release(self) -> None:
        """Show the held traceback, because the training continues or has not reported the error itself."""
        with self._gate_lock:
            self._stderr.write(self._gate.release())

    def finish(self, limit_seconds: float) -> None:
        """Read the rest of the output for at most `limit_seconds`, since a foreign process may keep a pipe open."""
        deadline = time.monotonic() + limit_seconds
        for pump in self._pumps:
            pump.join(max(0.0, deadline - time.monotonic()))
        if self._log.error is not None:
            self.log(f"warning: {self._log_path} is incomplete: {self._log.error.strerror}")

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _pump_stdout(self, pipe: int) -> None:
        log = _Lines(self._log)
        while data := _read(pipe, log):
            log.write(data)
            self._stdout.write(data)

    def _pump_stderr(self, pipe: int) -> None:
        log = _Lines(self._log)
        while True:
            if self._gate.has_partial and not _has_data(pipe, _PARTIAL_LINE_SECONDS):
                with self._gate_lock:
                    self._stderr.write(self._gate.flush())
            data = _read(pipe, log)
            log.write(data)
            with self._gate_lock:
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                self._stderr.write(self._gate.feed(data) if data else self._gate.flush())
            if not data:
                return


def _has_data(pipe: int, seconds: float) -> bool:
    try:
        return bool(select.select([pipe], [], [], seconds)[0])
    except (OSError, ValueError):  # closed while finish() no longer waited
        return True


def _read(pipe: int, log: _Lines) -> bytes:
    """Return the next bytes of a pipe, none at its end; an unfinished line is logged if no more comes for 2 seconds."""
    if log.has_unended and not _has_data(pipe, _UNENDED_LINE_SECONDS):
        log.flush()
    try:
        data = os.read(pipe, _CHUNK_BYTES)
    except OSError:
        data = b""
    if not data:
        log.flush()
    return data
