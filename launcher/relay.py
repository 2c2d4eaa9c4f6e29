"""The child's output on our console, as it comes, and all of it in the run's log.

accelerate and torch's agent end every failed run with tracebacks of their own, below the message that the training has
already printed. stderr therefore goes through a gate: what follows such a line waits until it is known whether the
training told its own story.
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

_TRACEBACK = b"Traceback (most recent call last):"
# What may stand before it: escape codes that clear a progress bar, and the rank, from torch's --tee and from torch.
_PREFIXES = re.compile(rb"(?:\x1b\[[0-9;?]*[A-Za-z])*(?:\[[A-Za-z_]+\d+\]: ?)*")
_PART_OF_PREFIX = re.compile(rb"\x1b(?:\[[0-9;?]*)?|\[[A-Za-z_]*\d*\]?:?")
_AGENT_LINE = re.compile(rb"[WEF]\d{4} \d\d:\d\d:\d\d\S* +\d+ +\S*torch/distributed/elastic/")
_AGENT_START = b"E0000 00:00:00"  # its form, each digit as 0
_PART_OF_AGENT_LINE = re.compile(rb"[WEF]\d{4} \d\d:\d\d:\d\d[^\r\n]{0,60}")
_LINE_END = re.compile(rb"[\r\n]")
_SAME_DIGIT = bytes.maketrans(b"123456789WF", b"000000000EE")

_PARTIAL_LINE_SECONDS = 0.2
_UNENDED_LINE_SECONDS = 2.0  # Python writes a line's end apart, and a busy machine may do something else in between
_CHUNK_BYTES = 65536
_TAIL_BYTES = 65536


class Gate:
    """Bytes in, bytes to show out. From the first line of a traceback on they are held."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._held_since: float | None = None
        self._partial = b""
        self._is_line_start = True

    @property
    def has_partial(self) -> bool:
        """The start of a line that may yet become a traceback's: give it a moment, then flush()."""
        return bool(self._partial)

    @property
    def held_seconds(self) -> float:
        return 0.0 if self._held_since is None else time.monotonic() - self._held_since

    def feed(self, data: bytes) -> bytes:
        if self._held_since is not None:
            self._held += data
            return b""
        data, self._partial = self._partial + data, b""
        position = 0
        while position < len(data):
            end = _LINE_END.search(data, position)
            if self._is_line_start:
                line = data[position : end.start() if end else None]
                if _starts_noise(line):
                    self._held += data[position:]
                    self._held_since = time.monotonic()
                    break
                if end is None and _may_start_noise(line):
                    self._partial = line
                    break
            self._is_line_start = end is not None
            position = end.end() if end else len(data)
        return data[:position]

    def flush(self) -> bytes:
        """The partial line: nothing came that would have made it a traceback's."""
        partial, self._partial = self._partial, b""
        self._is_line_start = self._is_line_start and not partial
        return partial

    def release(self) -> bytes:
        """All that is held; the gate is open again."""
        text = self.flush() + bytes(self._held)
        self._held.clear()
        self._held_since = None
        self._is_line_start = not text or text[-1:] in b"\r\n"
        return text


def _starts_noise(line: bytes) -> bool:
    rest = _without_prefixes(line)
    return rest.startswith(_TRACEBACK) or _AGENT_LINE.match(rest) is not None


def _may_start_noise(line: bytes) -> bool:
    rest = _without_prefixes(line)
    return bool(
        _TRACEBACK.startswith(rest)
        or _AGENT_START.startswith(rest.translate(_SAME_DIGIT))
        or _PART_OF_AGENT_LINE.fullmatch(rest)
        or _PART_OF_PREFIX.fullmatch(rest)
    )


def _without_prefixes(line: bytes) -> bytes:
    match = _PREFIXES.match(line)
    return line[match.end() :] if match else line


class _Sink:
    """A place for output that may fail, as a closed terminal or a full disk does, while the training goes on."""

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
    """One stream's way into a log that two share: line by line, but for a line that waits for its end for long."""

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
    """Where the child's two streams go. For a program that reads our stdout, both are our stderr."""

    stdout: IO[bytes]
    stderr: IO[bytes]
    columns: int | None = None  # of the terminal that stderr is; None: it is none


class Relay:
    """Two pumps, one log. start() it with the child's pipes, finish() it when the child has ended."""

    def __init__(self, console: Console, log: Path) -> None:
        self._log_path = log
        self._log = _Sink(log.open("ab", buffering=0))
        self._stdout, self._stderr = _Sink(console.stdout), _Sink(console.stderr)
        self._is_terminal = console.columns is not None
        self._gate = Gate()
        self._gate_lock = threading.Lock()
        self._tail = bytearray()
        self._pumps: list[threading.Thread] = []

    @property
    def tail(self) -> str:
        """The last of what the child wrote to stderr, shown or held."""
        with self._gate_lock:
            return self._tail.decode("utf-8", "replace")

    def start(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        for target, pipe in ((self._pump_stdout, stdout), (self._pump_stderr, stderr)):
            pump = threading.Thread(target=target, args=(pipe.fileno(),), daemon=True)
            pump.start()
            self._pumps.append(pump)

    def say(self, line: str) -> None:
        """A line of ours, on stderr and in the log. A moving line of the child's is wiped, not mixed with it."""
        data = f"{line}\n".encode(errors="replace")
        self._log.write(data)
        self._stderr.write((b"\r\x1b[K" if self._is_terminal else b"") + data)

    def held_seconds(self) -> float:
        with self._gate_lock:
            return self._gate.held_seconds

    def release(self) -> None:
        """Shows what is held: the training goes on, or it never told what happened."""
        with self._gate_lock:
            self._stderr.write(self._gate.release())

    def finish(self, limit_seconds: float) -> None:
        """Waits for the last bytes. A foreign process that still holds a pipe open is not waited for."""
        deadline = time.monotonic() + limit_seconds
        for pump in self._pumps:
            pump.join(max(0.0, deadline - time.monotonic()))
        if self._log.error is not None:
            self.say(f"warning: {self._log_path} is not whole: {self._log.error.strerror}")

    def close(self) -> None:
        self._log.close()

    def _pump_stdout(self, pipe: int) -> None:
        log = _Lines(self._log)
        while data := _read(pipe, log):
            log.write(data)
            self._stdout.write(data)

    def _pump_stderr(self, pipe: int) -> None:
        log = _Lines(self._log)
        while True:
            if self._gate.has_partial and not _comes(pipe, _PARTIAL_LINE_SECONDS):
                with self._gate_lock:
                    self._stderr.write(self._gate.flush())
            data = _read(pipe, log)
            log.write(data)
            with self._gate_lock:
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                self._stderr.write(self._gate.feed(data) if data else self._gate.flush())
            if not data:
                return


def _comes(pipe: int, seconds: float) -> bool:
    try:
        return bool(select.select([pipe], [], [], seconds)[0])
    except (OSError, ValueError):  # closed under a pump that was no longer waited for
        return True


def _read(pipe: int, log: _Lines) -> bytes:
    """The next bytes, none at the end. Meanwhile the log gets a line whose end does not come."""
    if log.has_unended and not _comes(pipe, _UNENDED_LINE_SECONDS):
        log.flush()
    try:
        data = os.read(pipe, _CHUNK_BYTES)
    except OSError:
        data = b""
    if not data:
        log.flush()
    return data
