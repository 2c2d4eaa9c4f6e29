"""`python -m launcher …` by fork, without the imports in each process.

A server process per pytest process has imported the package. For each command it forks a child, which takes over
arguments, environment and working directory, and writes to files: only exec is left out. With torch, the process that a
verb starts is forked too. Tests of the start itself, of pipes and terminals use subprocess.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from launcher.cli import torch_subcommands

ROOT = Path(__file__).resolve().parent.parent
_WITHOUT_TORCH = ("analysis", "base_models", "cli", "core", "corpus", "hardware", "launch", "manifest", "plan")
_OPTIONAL = ("wandb", "wandb_workspaces.workspaces", "pyarrow.parquet", "tokenizers")
_TRAINING = (
    "transformers",
    "peft",
    "accelerate",
    "launcher.training.loop",
    "launcher.training.inference.grade",
    "launcher.training.inference.load",
    "launcher.training.export.merge",
)
# Read by the interpreter when it starts, so a forked child would ignore them.
_AT_START = ("PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONUTF8", "LC_ALL", "LANG")


def run_python(
    arguments: Sequence[str],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    needs_torch: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` (a script, or `-m MODULE`) to its end, like subprocess.run with captured text."""
    environment = dict(os.environ if env is None else env)
    first_path = environment.get("PYTHONPATH", str(ROOT)).split(os.pathsep)[0]  # another one may hide packages
    needs_exec = arguments[0] == "-c" or first_path != str(ROOT)
    if needs_exec or any(environment.get(name) != os.environ.get(name) for name in _AT_START):
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return _start_server(needs_torch).run(arguments, cwd, environment)


@cache
def _start_server(needs_torch: bool) -> _Server:
    return _Server(needs_torch)


class _Server:
    def __init__(self, needs_torch: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forked-python-"))
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)  # after the process is killed
        self._errors = self._folder / "server.txt"
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tests.forked_python", "torch" if needs_torch else ""),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # read when torch is loaded
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("wb"),
            text=True,
        )
        atexit.register(self._process.kill)

    def run(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        out, err = self._folder / "stdout.txt", self._folder / "stderr.txt"
        request = {
            "arguments": [*arguments],
            "cwd": str(cwd),
            "environment": dict(environment),
            "out": str(out),
            "err": str(err),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._errors.read_text()[-3000:]
        return subprocess.CompletedProcess(
            [sys.executable, *arguments], json.loads(answer), out.read_text("utf-8"), err.read_text("utf-8")
        )


def _serve(needs_torch: bool) -> None:
    """Answer each request, a line of JSON, with the exit code of its child."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr, not into the responses
    gc.disable()
    for package in _WITHOUT_TORCH:
        module = importlib.import_module(f"launcher.{package}")
        for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            importlib.import_module(found.name)
    for name in _OPTIONAL:
        with suppress(ImportError):
            importlib.import_module(name)
    assert "torch" not in sys.modules
    for name in _TRAINING if needs_torch else ():
        importlib.import_module(name)
    if needs_torch:
        vars(torch_subcommands)["subprocess"] = types.SimpleNamespace(
            Popen=_ForkedModule, TimeoutExpired=subprocess.TimeoutExpired
        )
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")  # compiles all
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run_child(**json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        answers.flush()


def _run_child(arguments: list[str], cwd: str, environment: Mapping[str, str], out: str, err: str) -> NoReturn:
    with Path(out).open("wb") as stdout, Path(err).open("wb") as stderr:
        replace_process_state(environment, stdout, stderr)
    os.chdir(cwd)
    on_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    is_module = arguments[0] == "-m"
    first = cwd if is_module else str(Path(arguments[0]).parent)
    sys.path[:] = [first, *filter(None, on_path), *(one for one in sys.path if one not in ("", str(ROOT)))]
    sys.argv = arguments[1:] if is_module else arguments
    if is_module:
        exit_with(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))
    exit_with(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))


class _ForkedModule:
    """The part of subprocess.Popen that verbs with torch use: `python -P -m MODULE …` by fork, on the same streams."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        assert command[:3] == [sys.executable, "-P", "-m"], command
        self._pid = os.fork()
        if self._pid == 0:
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the parent
            replace_process_state(env, None, None, new_session=False)
            sys.argv = [*command[3:]]
            sys.path.remove(str(Path.cwd()))  # -P
            exit_with(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))

    def wait(self, _seconds: float | None = None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def replace_process_state(
    environment: Mapping[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None, *, new_session: bool = True
) -> None:
    """Reset what exec would reset: signal handlers, session, standard streams, environment."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if new_session:
        os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if stdout is not None:
        os.dup2(stdout.fileno(), 1)
    if stderr is not None or stdout is not None:
        os.dup2((stderr or stdout).fileno(), 2)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)


def exit_with(work: Callable[[], object]) -> NoReturn:
    """Run a function and exit like the interpreter: join threads, run exit functions."""
    code = 0
    try:
        work()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1] == "torch")
