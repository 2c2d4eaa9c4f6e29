"""`accelerate launch` and `launcher train` by fork, without the half minute of imports in each process.

A server process has imported all modules of a training but DeepSpeed, which each rank imports itself, after accelerate.
For each launch it forks the agent, which runs the code of accelerate and torch. Where that code would start a Python
script, the agent forks again and runs the script. Processes, process groups, agents, signals and /proc/PID/environ are
real: only exec is left out.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from launcher.core.processes import find_processes, is_alive, send_signal
from launcher.launch import single_process, supervise
from launcher.launch.start import ACCELERATE
from launcher.render import Command
from tests.conftest import ROOT
from tests.forked_python import exit_with, replace_process_state

LIMIT_SECONDS = 300.0
_PIDS_VARIABLE = "LAUNCHER_TEST_PIDS"  # file to which every rank appends its rank and process id at its start
_POLL_SECONDS = 0.02
_MARK_VARIABLE = "LAUNCHER_TEST_MARK"
# Processes are found by these variables in /proc/PID/environ, which shows the memory that exec has filled.
_SHOWN = (_MARK_VARIABLE, supervise._MARK)
_UNMARKED = "0" * 32
# launcher/train.py and its libraries import these when they are needed.
_TRAINING = (
    "launcher.request.arguments",
    "launcher.training.cluster.preflight",
    "launcher.training.runtime.rendezvous",
    "launcher.training.trainer",
    "numpy.ma",
    "pandas",
    "peft.utils.transformers_weight_conversion",
    "pyarrow.compute",
    "pyarrow.pandas_compat",
    "transformers.models.qwen3.modeling_qwen3",
)


class ForkServer:
    """Client of the server process."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = {**environment, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tests.faults.fork_server"),
            cwd=ROOT,
            env={**self._environment, **dict.fromkeys(_SHOWN, _UNMARKED)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "fork_server.txt").open("wb"),
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    @contextmanager
    def started(self, command: Command, **more: str) -> Iterator[LaunchedProcesses]:
        name = uuid.uuid4().hex
        console, pids = self.folder / f"console-{name}.txt", self.folder / f"pids-{name}.txt"
        environment = {**self._environment, **command.environment, "OMP_NUM_THREADS": "1", **more}
        entry = {
            "argv": command.argv,
            "environment": {**environment, _PIDS_VARIABLE: str(pids), _MARK_VARIABLE: name},
            "console": str(console),
        }
        launched = LaunchedProcesses(
            fork_server=self, agent=self.request(entry), mark=name, console_file=console, pids_file=pids
        )
        try:
            yield launched
        finally:
            launched.clear()

    def launch(self, command: Command, **more: str) -> LaunchedProcesses:
        """Launch a command and wait until its last process has exited."""
        with self.started(command, **more) as launched:
            launched.wait()
        return launched

    def request(self, question: Mapping[str, object]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self.folder / "fork_server.txt").read_text()[-3000:]
        return json.loads(answer)


@dataclass(kw_only=True)
class LaunchedProcesses:
    """An agent, or a launcher with its agents, and the ranks."""

    fork_server: ForkServer
    agent: int
    mark: str
    console_file: Path
    pids_file: Path
    returncode: int | None = None

    @property
    def console(self) -> str:
        return self.console_file.read_text(errors="replace") if self.console_file.exists() else ""

    @property
    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        lines = self.pids_file.read_text().splitlines() if self.pids_file.exists() else []
        return {int(rank): int(pid) for rank, pid in map(str.split, lines)}

    @property
    def living(self) -> tuple[int, ...]:
        return tuple(pid for pid in (self.agent, *self.ranks.values()) if is_alive(pid))

    @property
    def processes(self) -> tuple[int, ...]:
        """All live processes of this launch, with those that were started by exec."""
        return find_processes(f"{_MARK_VARIABLE}={self.mark}")

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.fork_server.request({"poll": self.agent})
        return self.returncode

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """Wait until the last process has exited; return the exit code of the agent."""
        self.wait_until(lambda: self.poll() is not None and not self.living, seconds)
        assert self.returncode is not None
        return self.returncode

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
        start_time = time.monotonic()
        while not condition():
            if time.monotonic() - start_time > seconds:
                pytest.fail(f"did not happen within {seconds:.0f} s:\n{self.console[-3000:]}")
            time.sleep(_POLL_SECONDS)

    def clear(self) -> None:
        start_time = time.monotonic()
        while (living := self.processes) and time.monotonic() - start_time < 10:
            send_signal(living, signal.SIGKILL)
            self.poll()
            time.sleep(_POLL_SECONDS)
        self.poll()


def serve() -> None:
    """Run the server: one line of JSON per request, one line per response."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr, not into the responses
    gc.disable()  # collections would take an eighth of the time of the imports
    from accelerate.commands import launch  # noqa: F401
    from torch.distributed import fsdp, run  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from launcher.corpus import prepare  # noqa: F401

    for name in _TRAINING:
        importlib.import_module(name)
    assert "deepspeed" not in sys.modules
    get_checkpoint_conversion_mapping("")  # cached: a thousand compiled patterns, with which a base model is loaded
    gc.freeze()
    gc.enable()

    codes: dict[int, int] = {}
    find_shown_variables()
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            answer = _poll(question["poll"], codes)
        else:
            answer = os.fork()
            if answer == 0:
                _become_command(**question)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # the interpreter would take seconds to free all modules


@cache
def find_shown_variables() -> Mapping[str, int]:
    """Return the addresses of the variables that /proc/PID/environ shows. Call before the environment is changed."""
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_void_p
    return {name: get(name.encode()) for name in _SHOWN}


def show_variables(environment: Mapping[str, str]) -> None:
    """Change /proc/PID/environ as exec would do it."""
    for name, address in find_shown_variables().items():
        value = environment.get(name, _UNMARKED).encode()
        assert len(value) == len(_UNMARKED)
        ctypes.memmove(address, value, len(value))


def _poll(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


def _become_command(argv: Sequence[str], environment: Mapping[str, str], console: str) -> NoReturn:
    show_variables(environment)
    replace_process_state(environment, stdout=Path(console).open("wb"), stderr=None)  # noqa: SIM115
    _run_command(argv)


def _run_command(argv: Sequence[str]) -> NoReturn:
    """Do what exec would do, in this process."""
    if tuple(argv[: len(ACCELERATE)]) == ACCELERATE:
        _run_agent(argv[len(ACCELERATE) :])
    vars(supervise)["subprocess"] = types.SimpleNamespace(
        Popen=ForkedCommand, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE
    )
    if argv[1] == "-m":
        sys.argv = [*argv[2:]]
        exit_with(lambda: runpy.run_module(argv[2], run_name="__main__", alter_sys=True))
    if argv[1].endswith(".py"):
        sys.argv = [*argv[1:]]
        exit_with(lambda: runpy.run_path(argv[1], run_name="__main__"))
    if single_process.__file__ in argv:
        vars(single_process)["subprocess"] = _FORKING
        sys.argv = [*argv[argv.index(single_process.__file__) :]]
        exit_with(single_process.main)
    os.execve(argv[0], [*argv], os.environ)


def _run_agent(arguments: Sequence[str]) -> NoReturn:
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    vars(subprocess_handler)["Popen"] = ForkedProcess
    vars(launch)["subprocess"] = _FORKING
    sys.argv = ["accelerate", *arguments]
    exit_with(launch.main)


class ForkedProcess:
    """The part of subprocess.Popen that agents use. The child runs a Python script instead of exec."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert args[0] == sys.executable, args
        self.args = args
        self.returncode: int | None = None
        env = dict(os.environ if env is None else env)
        self.pid = os.fork()
        if self.pid == 0:
            with Path(env[_PIDS_VARIABLE]).open("a") as pids:
                pids.write(f"{env.get('RANK', '0')} {os.getpid()}\n")
            replace_process_state(env, stdout, stderr, new_session=start_new_session)
            sys.argv = [word for word in args[1:] if word != "-u"]
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            exit_with(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        start_time = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - start_time > timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(_POLL_SECONDS)
        return code


_FORKING = types.SimpleNamespace(Popen=ForkedProcess, CalledProcessError=subprocess.CalledProcessError)


class ForkedCommand(ForkedProcess):
    """The part of subprocess.Popen that the supervision of a run uses, with pipes."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        self.args = args
        self.returncode = None
        pipes = [os.pipe() for _ in ("stdout", "stderr")]
        self.pid = os.fork()
        if self.pid == 0:
            show_variables(env)
            stdout, stderr = (os.fdopen(writer, "wb") for _, writer in pipes)
            replace_process_state(env, stdout, stderr)
            for reader, writer in pipes:
                os.close(reader)
                os.close(writer)
            start = args.index(supervise._IGNORE_SIGNALS) + 1
            for number in supervise.STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            _run_command(args[start:])
        for pipe in pipes:
            os.close(pipe[1])
        self.stdout, self.stderr = (os.fdopen(reader, "rb") for reader, _ in pipes)


if __name__ == "__main__":
    serve()
