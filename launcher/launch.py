"""Plan -> run directory -> training: every file that a run uses is written, then `accelerate launch` is started."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from launcher.agents import make_argv
from launcher.choices import DEEPSPEED_STRATEGIES
from launcher.ending import find_absence, make_node_outcome, make_outcome, name_dead_ranks, tells_out_of_memory
from launcher.errors import ExitCode, InputError, RunFailedError
from launcher.hardware import Hardware, format_hardware
from launcher.inputs import PlannedRun
from launcher.nodes import JOIN_FLAGS, Node, check_node, find_run_to_join
from launcher.paths import RunPaths, removed_on_failure, write_files
from launcher.plan.model import Plan
from launcher.probe import probe_hardware
from launcher.processes import LAUNCHER_TERMINAL, make_child_environment
from launcher.record import Outcome, load_outcome, write_outcome
from launcher.relay import Console, Relay
from launcher.render import (
    TRAIN_SCRIPT,
    Command,
    Rendezvous,
    SlurmOptions,
    render,
    render_command,
    render_slurm,
)
from launcher.report import write_report
from launcher.runs import create_run_directory, input_texts
from launcher.supervise import Ending, Limits, supervise

# By this Python, not by whatever `accelerate` the PATH finds first.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")

_RECORD_SECONDS = 5.0  # how long rank 0 may take, on another node, to write how the run ended
_LOOK_EVERY_SECONDS = 0.2

_PACKAGES = ("accelerate", "jinja2", "numpy", "peft", "pyarrow", "tokenizers", "torch", "transformers")


def check_packages(plan: Plan) -> None:
    """Looks for what a training imports, without importing it."""
    wanted = (*_PACKAGES, "deepspeed") if plan.strategy in DEEPSPEED_STRATEGIES else _PACKAGES
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"training needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'expert-launcher[train]', or `make train`, which installs them",
        )


def check_startable(plan: Plan, node: Node | None = None) -> None:
    """A plan for other hardware can be written here, but not started."""
    planned = plan.hardware
    if planned.nodes > 1 and node is None:
        raise InputError(
            f"this plan is for {format_hardware(planned)}; `launcher train` starts one node",
            hint=f"on each of them: {JOIN_FLAGS}; --slurm submits it to Slurm; "
            "--dry-run writes the files: submit slurm.sbatch, or run command.txt on every node",
        )
    if node is not None:
        check_node(plan, node)
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


def write_run(
    planned: PlannedRun,
    runs_dir: Path,
    run_id: str | None,
    *,
    rendezvous: Rendezvous | None = None,
    slurm: SlurmOptions | None = None,
) -> RunPaths:
    """runs/<id>/ with the inputs, the plan and what would be started. `slurm`: with its script on one node too."""
    paths = create_run_directory(planned, runs_dir, run_id)
    fill_run(planned, paths, rendezvous=rendezvous, slurm=slurm)
    return paths


def fill_run(
    planned: PlannedRun,
    paths: RunPaths,
    *,
    rendezvous: Rendezvous | None = None,
    slurm: SlurmOptions | None = None,
) -> None:
    """Into a new directory."""
    with removed_on_failure(paths):
        fill_existing(planned, paths, rendezvous=rendezvous, slurm=slurm)


def fill_existing(
    planned: PlannedRun,
    paths: RunPaths,
    *,
    rendezvous: Rendezvous | None = None,
    slurm: SlurmOptions | None = None,
    script_args: Sequence[str] = (),
) -> None:
    """plan.json comes last: a node that shares the directory knows by it that all is there."""
    script = find_train_script()
    texts = input_texts(planned, paths)
    texts |= render(planned.plan, paths, rendezvous=rendezvous, script=script, slurm=slurm)
    if slurm is not None:
        texts[paths.slurm.name] = render_slurm(
            planned.plan, paths, options=slurm, script=script, script_args=script_args
        )
    plan = {paths.plan.name: texts.pop(paths.plan.name)}
    write_files(paths.root, texts | plan)


def join_run(planned: PlannedRun, runs_dir: Path, run_id: str, node: Node) -> RunPaths:
    """The directory that another node made on a file system that we share, or one of our own."""
    found = find_run_to_join(runs_dir, run_id, planned.plan, node)
    if found is not None:
        return found
    # Whoever reads command.txt may be any node: what only this one is told does not belong there.
    rendezvous = replace(node.rendezvous, is_host=None)
    try:
        made = write_run(planned, runs_dir, run_id, rendezvous=rendezvous)
    except InputError:
        found = find_run_to_join(runs_dir, run_id, planned.plan, node)  # another node was faster
        if found is None:
            raise
        return found
    return replace(made, node_rank=node.rank)


def find_train_script() -> str:
    """As a user would type it in a checkout; the installed file elsewhere."""
    return TRAIN_SCRIPT if Path(TRAIN_SCRIPT).is_file() else str(Path(__file__).resolve().with_name("train.py"))


def start_run(
    plan: Plan,
    paths: RunPaths,
    console: Console,
    *,
    nodes: Sequence[Node] = (),
    script: str | None = None,
    script_args: Sequence[str] = (),
    accelerate: Sequence[str] = ACCELERATE,
    limits: Limits | None = None,
) -> Outcome:
    """Starts what the run directory holds and stays until its last process has ended. The outcome is always final.

    `nodes`: those that this machine is, where there are many; a rehearsal is all of them.
    """
    started_at = datetime.now(UTC)
    commands = [
        replace(command, argv=(*command.argv, *script_args))
        for command in _render_commands(plan, paths, nodes, script or find_train_script(), accelerate)
    ]
    _reopen(paths, nodes)
    environment = make_environment(commands[0], console, os.environ)
    argv = make_argv([command.argv for command in commands])
    relay = _open_relay(console, paths)
    try:
        ending = supervise(argv, environment, relay, lambda: _load_final(paths) is not None, limits)
        absence = find_absence(paths, ending, nodes[0], plan.hardware.nodes) if nodes else None
        if nodes and not any(node.keeps_record for node in nodes):
            return _end_elsewhere(paths, ending, nodes[0], relay, started_at, absence)
        outcome = _load_final(paths)
        if outcome is not None and outcome.exit_code == ExitCode.RUN_FAILED:
            outcome = _name_cause(paths, outcome, ending, relay)
        if absence is None and (outcome is None or not outcome.exit_code):
            relay.release()
        if outcome is None:
            outcome = make_outcome(paths, ending, load_outcome(paths.outcome), started_at)
            outcome = outcome if absence is None else outcome.model_copy(update={"error": str(absence)})
            relay.say(f"error: {outcome.error}")
            _try_to_write(paths, outcome, relay)
        return outcome
    finally:
        relay.close()


def _name_cause(paths: RunPaths, outcome: Outcome, ending: Ending, relay: Relay) -> Outcome:
    """Rank 0 only saw that another was gone; the agent knows what became of that one."""
    if tells_out_of_memory(ending):
        changes: dict[str, object] = {
            "exit_code": int(ExitCode.DOES_NOT_FIT),
            "error": "another rank ran out of memory",
        }
    elif dead := name_dead_ranks(ending):
        relay.say(f"error: {dead}")
        changes = {"error": f"{dead}\n{outcome.error}"}
    else:
        return outcome
    named = outcome.model_copy(update=changes)
    _try_to_write(paths, named, relay)
    return named


def _render_commands(
    plan: Plan, paths: RunPaths, nodes: Sequence[Node], script: str, accelerate: Sequence[str]
) -> list[Command]:
    if not nodes:
        return [render_command(plan, paths, script=script, accelerate=accelerate)]
    return [
        render_command(
            plan,
            paths,
            rendezvous=node.rendezvous,
            machine_rank=node.rank if node.rendezvous.backend == "static" else None,  # torch would ignore it aloud
            script=script,
            accelerate=accelerate,
        )
        for node in nodes
    ]


def make_environment(command: Command, console: Console, inherited: Mapping[str, str]) -> dict[str, str]:
    environment = make_child_environment({**inherited, **command.environment})
    environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would get its lines by the block
    environment.pop(LAUNCHER_TERMINAL, None)
    if console.columns is not None:
        environment |= {LAUNCHER_TERMINAL: "1", "COLUMNS": str(console.columns)}
    return environment


def _end_elsewhere(
    paths: RunPaths,
    ending: Ending,
    node: Node,
    relay: Relay,
    started_at: datetime,
    absence: RunFailedError | None,
) -> Outcome:
    """On a node where rank 0 need not run: its record may lie here, be a moment late, or lie on another node."""
    running = load_outcome(paths.outcome)
    is_late = running is not None and ending.returncode > 0  # a killed agent is itself the reason
    deadline = time.monotonic() + (_RECORD_SECONDS if is_late else 0.0)
    while (outcome := _load_final(paths)) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_SECONDS)
    if outcome is None or ending.returncode < 0:
        outcome = make_node_outcome(paths, ending, running, started_at, node)
        outcome = outcome if absence is None else outcome.model_copy(update={"error": str(absence)})
    if not outcome.exit_code:
        relay.release()
    elif outcome.error:
        # Of a traceback the last line; the rank that had it has shown it whole, perhaps on another node.
        told = outcome.error.splitlines()[-1] if outcome.error.startswith("Traceback") else outcome.error
        if told.splitlines()[0] not in relay.tail:
            relay.say(f"error: {told}")
    return outcome


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
        return
    write_report(paths)


def _reopen(paths: RunPaths, nodes: Sequence[Node]) -> None:
    """How an earlier start of this run ended is not how this one will."""
    outcome = _load_final(paths)
    if outcome is not None and (not nodes or any(node.keeps_record for node in nodes)):
        changes = {"status": "running", "exit_code": None, "error": "", "ended_at": None, "pid": os.getpid()}
        write_outcome(paths.outcome, outcome.model_copy(update=changes))


def _load_final(paths: RunPaths) -> Outcome | None:
    outcome = load_outcome(paths.outcome)
    return outcome if outcome is not None and outcome.is_final else None
