"""One process that judges, kept between answers; killed and started anew where an answer hangs or kills it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from launcher.errors import LauncherError
from launcher.quality.sql_ruling import Ruling, fail
from launcher.quality.sql_worker import CPU_SECONDS, PARSED, PREPARED, READY, Request

START_SECONDS = 60.0
ANSWER_SECONDS = 5.0 * CPU_SECONDS  # on a busy machine a second of work takes more than one
_KEPT_VARIABLES = {"PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV"}
_PACKAGES = Path(__file__).resolve().parents[2]


def _make_environment() -> dict[str, str]:
    """What Python needs to find its packages; no token is for the eyes of an answer."""
    path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES}
    return {**kept, "PYTHONPATH": path, "PYTHONUTF8": "1"}


class _SilentError(Exception):
    """It has died, or says nothing for too long."""


class JudgingProcess:
    """Starts with the first answer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def ask(self, request: Request) -> Ruling:
        """Whatever becomes of the process, this answers: who hangs it is wrong."""
        process = self._started()
        stage = READY
        try:
            self._write(process, request.model_dump_json() + "\n")
            while (line := self._read_line(process, ANSWER_SECONDS)) in (PREPARED, PARSED):
                stage = line
            return Ruling.model_validate_json(line)
        except _SilentError as error:
            self.close()
            if stage == READY:
                return Ruling(reason=f"not judged: the row's tables and reference {error}")
            return fail(f"it {error}", parses=stage == PARSED)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        process = subprocess.Popen(
            [sys.executable, "-B", "-m", "launcher.quality.sql_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_make_environment(),
            start_new_session=True,  # Ctrl-C is for whoever asks
            bufsize=0,
        )
        self._process, self._unread = process, b""
        try:
            said = self._read_line(process, START_SECONDS)
        except _SilentError as error:
            said = str(error)
        if said != READY:
            self.close()
            raise LauncherError(
                f"the process that judges SQL did not start: it {said}",
                hint=f"what it says: {sys.executable} -m launcher.quality.sql_worker < /dev/null",
            )
        return process

    def _write(self, process: subprocess.Popen[bytes], text: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(text.encode())
        except BrokenPipeError:
            raise _SilentError("ended the process that judges") from None

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> str:
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise _SilentError(f"took more than {seconds:.0f} s")
            piece = os.read(process.stdout.fileno(), 65_536)
            if not piece:
                process.wait()
                raise _SilentError("took more time or memory than any answer needs")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()
