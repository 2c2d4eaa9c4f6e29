"""`launcher dashboard` that forks the process in which it talks to W&B, instead of importing wandb again."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import NoReturn

from launcher.analysis.wandb_dashboard import save
from launcher.cli.main import main
from tests.forked_python import exit_with


class ForkedSave:
    """The part of subprocess.Popen that `save_with_timeout` uses, without the timeout."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        assert command == [sys.executable, "-P", "-m", save.__name__], command
        requests, self._stdin = os.pipe()
        self._stdout, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _become_save(env, requests, answers)
        os.close(requests)
        os.close(answers)

    def communicate(self, request: bytes, **_: object) -> tuple[bytes, bytes]:
        with os.fdopen(self._stdin, "wb") as stdin, os.fdopen(self._stdout, "rb") as stdout:
            stdin.write(request + b"\n")
            stdin.flush()
            return stdout.readline(), b""

    def kill(self) -> None:
        pass

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _become_save(env: Mapping[str, str], requests: int, answers: int) -> NoReturn:
    os.environ.update(env)
    os.dup2(requests, 0)
    os.dup2(answers, 1)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    exit_with(save.main)


if __name__ == "__main__":
    vars(save)["subprocess"] = types.SimpleNamespace(
        Popen=ForkedSave, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    sys.exit(main())
