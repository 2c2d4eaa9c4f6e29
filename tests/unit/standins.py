"""Fake training scripts, and a launcher process that starts one, for tests of everything around the training."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from launcher.core.run_paths import RunPaths
from launcher.launch.write_run import write_run
from launcher.plan import Plan
from launcher.request.request import PlannedRun, Request, plan_request
from launcher.runs.record import Outcome, load_outcome
from tests.conftest import ROOT, python_path

# Helpers of every fake training script, which is started with --plan runs/<id>/plan.json.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from launcher.core.run_paths import RunPaths

paths = RunPaths(Path(sys.argv[sys.argv.index("--plan") + 1]).parent)

def outcome(status, exit_code=None, error=""):
    known = {"run_id": "r", "started_at": "t", "pid": os.getpid(), "steps_done": 3}
    new = paths.root / ".outcome.json"
    new.write_text(json.dumps({"status": status, "exit_code": exit_code, "error": error, **known}))
    new.rename(paths.outcome)

def note(text):
    with (paths.root / "notes.txt").open("a") as file:
        file.write(text + "\\n")

def say(text):
    sys.stderr.write(text + "\\n")  # one write: torchrun prefixes whatever it reads
    sys.stderr.flush()

"""

_LAUNCHER = """
import os, sys
from pathlib import Path
from launcher.core.log import configure
from launcher.launch.start import start_run
from launcher.core.run_paths import RunPaths
from launcher.plan import Plan
from launcher.launch.console import Console
from launcher.launch.supervise import Timeouts

configure()
paths, script, columns, limits = RunPaths(Path(sys.argv[1])), sys.argv[2], sys.argv[3], sys.argv[4]
plan = Plan.model_validate_json(paths.plan.read_text())
console = Console(stdout=sys.stdout.buffer, stderr=sys.stderr.buffer, columns=int(columns) if columns else None)
numbers = [float(number) for number in limits.split()]
chosen = Timeouts(kill=numbers[0], leftover=numbers[1], orphan=numbers[2], held=numbers[3])
outcome = start_run(plan, paths, console, script=script, timeouts=chosen)
assert outcome.is_final
sys.exit(outcome.exit_code)
"""


# Settings of a training that is planned or run only for what surrounds it.
SHORT_SETTINGS = tuple(
    f"training.config.{setting}"
    for setting in (
        "max_seq_length=128",
        "batch_size=4",
        "gradient_accumulation_steps=1",
        "evaluation_strategy=no",
        "load_best_model_at_end=false",
    )
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits of the launcher, in seconds."""

    kill: float = 10
    leftover: float = 10
    orphan: float = 10
    held: float = 10


@dataclass(frozen=True, kw_only=True)
class Arena:
    """A run directory and the fake training scripts started on it."""

    paths: RunPaths
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self,
        body: str,
        *,
        columns: str = "",
        before: str = "",
        **limits: float,
    ) -> subprocess.Popen[bytes]:
        typed = self.folder / "typed.txt"
        typed.write_text("typed text must not reach the training")
        process = subprocess.Popen(
            self.write_command(body, columns=columns, before=before, limits=Limits(**limits)),
            env={**os.environ, "PYTHONPATH": python_path()},
            cwd=ROOT,
            stdin=typed.open(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def write_command(
        self, body: str, *, columns: str = "", before: str = "", limits: Limits | None = None
    ) -> tuple[str, ...]:
        """Write a fake training script and a launcher that starts it; return the command of the launcher."""
        script, driver = (self.folder / name for name in ("script.py", "driver.py"))
        script.write_text(PREAMBLE + textwrap.dedent(body))
        driver.write_text(textwrap.dedent(before) + _LAUNCHER)
        times = limits or Limits()
        seconds = f"{times.kill} {times.leftover} {times.orphan} {times.held}"
        return (sys.executable, str(driver), str(self.paths.root), str(script), columns, seconds)

    def close(self) -> None:
        """Stop processes left by a failed test: a second signal makes the launcher kill its children."""
        for process in self.started:
            for _ in range(2):
                process.poll()
                process.terminate()
                time.sleep(0 if process.returncode is not None else 0.5)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)

    def run(self, body: str, *, columns: str = "", **limits: float) -> Result:
        return finish(self.start(body, columns=columns, before="", **limits))

    @property
    def outcome(self) -> Outcome:
        outcome = load_outcome(self.paths.outcome)
        assert outcome is not None
        return outcome

    @property
    def notes(self) -> list[str]:
        file = self.paths.root / "notes.txt"
        return file.read_text().splitlines() if file.is_file() else []

    @property
    def log(self) -> str:
        return self.paths.console_log.read_text()

    def wait_for_note(self, text: str) -> None:
        wait_until(lambda: text in self.notes)


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    stdout: str
    stderr: str


def make_arena(folder: Path, num_ranks: int = 1) -> Arena:
    planned = _plan_smoke()
    if num_ranks > 1:
        planned = replace(planned, plan=_on_cpu_ranks(planned.plan, num_ranks))
    return Arena(paths=write_run(planned, folder / "runs", "r"), folder=folder)


@cache
def _plan_smoke() -> PlannedRun:
    return plan_request(Request(expert="neo4j", profile="smoke"))


def _on_cpu_ranks(plan: Plan, num_ranks: int) -> Plan:
    hardware = plan.hardware.model_copy(update={"gpus_per_node": num_ranks})
    batch = plan.batch.model_copy(update={"num_ranks": num_ranks})
    return plan.model_copy(update={"hardware": hardware, "batch": batch, "strategy": "ddp"})


def finish(process: subprocess.Popen[bytes]) -> Result:
    stdout, stderr = process.communicate(timeout=60)
    return Result(code=process.returncode, stdout=stdout.decode(), stderr=stderr.decode())


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
