"""Processes that measure: started with a specification, told by a pipe what to do, ended when they take too long."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import ExitCode, LauncherError, Problem
from launcher.processes import make_dependent_environment
from launcher.values import Frozen

_SECONDS_TO_END = 20.0
_SHOWN_LINES = 12
_LONGEST_READ = 1 << 16


class ChildFailedError(LauncherError):
    """Its exit code is ours."""

    def __init__(self, title: str, log: Path, exit_code: int, hint: str = "") -> None:
        lines = _read_tail(log)
        super().__init__(title, tuple(Problem(where="", what=line) for line in lines), hint)
        self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.RUN_FAILED

    @property
    def reason(self) -> str:
        """In one line: the message of an error of ours, or the last line of a traceback."""
        if not self.problems:
            return self.title
        first, last = self.problems[0].what, self.problems[-1].what
        return first.removeprefix("error: ") if first.startswith("error: ") else last


class ChildTooLongError(ChildFailedError):
    """It was ended because it took longer than it may."""


class Child:
    """`python -m MODULE SPEC`: a line on stdin is a task, a line on stdout its answer; it ends with its stdin."""

    def __init__(self, module: str, spec: Frozen, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file, self._log, self._name = folder / f"{name}.json", folder / f"{name}.log", name
        file.write_text(spec.model_dump_json(), encoding="utf-8")
        sys.stdout.flush()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # -P: files in the working directory must not stand in for packages of the same name.
                [sys.executable, "-P", "-m", module, str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=make_dependent_environment(),
                start_new_session=True,  # its workers end with it
            )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: reading its answer tells
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()

    def read(self, limit_seconds: float) -> str:
        """Its next line. Raises where it ends without one, or takes too long."""
        deadline = time.monotonic() + limit_seconds
        while b"\n" not in self._rest:
            assert self._process.stdout is not None
            descriptor = self._process.stdout.fileno()
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise ChildTooLongError(
                    f"{self._name}: no answer after {limit_seconds:.0f} s", self._log, ExitCode.RUN_FAILED
                )
            read = os.read(descriptor, _LONGEST_READ)
            if not read:
                raise self._explain_end()
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")

    def end(self) -> None:
        """Its memory is free when this returns."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _explain_end(self) -> ChildFailedError:
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return ChildFailedError(f"{self._name}: it could not be measured ({how})", self._log, code)


@contextlib.contextmanager
def started(module: str, spec: Frozen, folder: Path, name: str) -> Iterator[Child]:
    with ending(Child(module, spec, folder, name)) as child:
        yield child


@contextlib.contextmanager
def ending(child: Child) -> Iterator[Child]:
    try:
        yield child
    except BaseException:
        child.kill()
        raise
    finally:
        child.end()


class Lineup:
    """Children that measure one after the other. While one does, the next one starts and reads its libraries, which
    takes as long as many measurements; it waits for a word before it touches the device."""

    def __init__(self, module: str, folder: Path, specs: Sequence[tuple[str, Frozen]], *, ahead: bool) -> None:
        self._module, self._folder, self._left, self._ahead = module, folder, deque(specs), ahead
        self._ready: Child | None = None

    def take(self) -> Child:
        child, self._ready = self._ready or self._start(), None
        if self._ahead and self._left:
            self._ready = self._start()
        return child

    def _start(self) -> Child:
        name, spec = self._left.popleft()
        return Child(self._module, spec, self._folder, name)

    def __enter__(self) -> Lineup:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._ready is not None:
            self._ready.kill()
            self._ready.end()


def _read_tail(log: Path) -> list[str]:
    """What it said last: the message of an error of ours, or the end of a traceback."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            lines = deque((line.rstrip() for line in file if line.strip()), maxlen=_SHOWN_LINES)
    except OSError:
        return []
    told = list(lines)
    errors = [place for place, line in enumerate(told) if line.startswith("error: ")]
    return told[errors[-1] :] if errors else told
