"""Plan -> run directory -> training: every file that a run uses is written, then `accelerate launch` is started."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import launcher
from launcher.choices import DEEPSPEED_STRATEGIES
from launcher.ending import make_outcome
from launcher.errors import InputError
from launcher.hardware import Hardware, format_hardware
from launcher.inputs import PlannedRun
from launcher.paths import RunPaths, removed_on_failure, write_files
from launcher.plan.model import Plan
from launcher.probe import probe_hardware
from launcher.record import Outcome, load_outcome, write_outcome
from launcher.relay import Console, Relay
from launcher.render import TRAIN_SCRIPT, Command, render, render_command
from launcher.runs import create_run_directory, input_texts
from launcher.supervise import Limits, supervise

# By this Python, not by whatever `accelerate` the PATH finds first.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
TERMINAL_VARIABLE = "LAUNCHER_TERMINAL"  # set: what the training writes to stderr is seen on a terminal

_PACKAGES = ("accelerate", "jinja2", "numpy", "peft", "pyarrow", "tokenizers", "torch", "transformers")
_SITE_FOLDERS = ("site-packages", "dist-packages")


def check_packages(plan: Plan) -> None:
    """Looks for what a training imports, without importing it."""
    wanted = (*_PACKAGES, "deepspeed") if plan.strategy in DEEPSPEED_STRATEGIES else _PACKAGES
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"training needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'expert-launcher[train]', or `make train`, which installs them",
        )


def check_startable(plan: Plan) -> None:
    """A plan for other hardware can be written here, but not started."""
    planned = plan.hardware
    if planned.nodes > 1:
        raise InputError(
            f"this plan is for {format_hardware(planned)}; `launcher train` starts one node",
            hint="--dry-run writes the files: submit slurm.sbatch, or run command.txt on every node",
        )
    if planned.source == "probe":
        return
    here = probe_hardware()
    if not _is_part_of(planned, here):
        raise InputError(
            f"this plan is for {format_hardware(planned)}; this machine is {format_hardware(here)}",
            hint="--dry-run writes the files to copy to that machine; without --gpu the plan is for this one",
        )


def _is_part_of(planned: Hardware, here: Hardware) -> bool:
    keys = [None if hardware.gpu is None else hardware.gpu.key for hardware in (planned, here)]
    return keys[0] == keys[1] and planned.gpus_per_node <= here.gpus_per_node


def write_run(planned: PlannedRun, runs_dir: Path, run_id: str | None) -> RunPaths:
    """runs/<id>/ with the inputs, the plan and what would be started."""
    paths = create_run_directory(planned, runs_dir, run_id)
    with removed_on_failure(paths):
        rendered = render(planned.plan, paths, script=find_train_script())
        write_files(paths.root, {**input_texts(planned, paths), **rendered})
    return paths


def find_train_script() -> str:
    """As a user would type it in a checkout; the installed file elsewhere."""
    return TRAIN_SCRIPT if Path(TRAIN_SCRIPT).is_file() else str(Path(__file__).resolve().with_name("train.py"))


def start_run(
    plan: Plan,
    paths: RunPaths,
    console: Console,
    *,
    script: str | None = None,
    accelerate: Sequence[str] = ACCELERATE,
    limits: Limits | None = None,
) -> Outcome:
    """Starts what the run directory holds and stays until its last process has ended. The outcome is always final."""
    started_at = datetime.now(UTC)
    command = render_command(plan, paths, script=script or find_train_script(), accelerate=accelerate)
    environment = make_environment(command, console, os.environ)
    relay = _open_relay(console, paths)
    try:
        ending = supervise(command.argv, environment, relay, lambda: _load_final(paths) is not None, limits)
        outcome = _load_final(paths)
        if outcome is None or not outcome.exit_code:
            relay.release()
        if outcome is None:
            outcome = make_outcome(paths, ending, load_outcome(paths.outcome), started_at)
            relay.say(f"error: {outcome.error}")
            _try_to_write(paths, outcome, relay)
        return outcome
    finally:
        relay.close()


def make_environment(command: Command, console: Console, inherited: Mapping[str, str]) -> dict[str, str]:
    environment = {**inherited, **command.environment}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would get its lines by the block
    package_parent = Path(launcher.__file__).resolve().parent.parent
    if package_parent.name not in _SITE_FOLDERS:  # which must not come before the standard library
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(package_parent), inherited.get("PYTHONPATH"))))
    environment.pop(TERMINAL_VARIABLE, None)
    if console.columns is not None:
        environment |= {TERMINAL_VARIABLE: "1", "COLUMNS": str(console.columns)}
    return environment


def _open_relay(console: Console, paths: RunPaths) -> Relay:
    try:
        return Relay(console, paths.console_log)
    except OSError as error:
        raise InputError(f"{paths.console_log} cannot be written: {error.strerror}") from None


def _try_to_write(paths: RunPaths, outcome: Outcome, relay: Relay) -> None:
    """A full disk may be what ended the run: the exit code must tell of the run all the same."""
    try:
        write_outcome(paths.outcome, outcome)
    except InputError as error:
        relay.say(f"warning: {error}")


def _load_final(paths: RunPaths) -> Outcome | None:
    outcome = load_outcome(paths.outcome)
    return outcome if outcome is not None and outcome.is_final else None
