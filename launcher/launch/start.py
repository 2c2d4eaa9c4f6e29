"""Start the training of a run directory as `accelerate launch` does and supervise it until its last process ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from launcher.core.errors import ExitCode, InputError, RunFailedError, hint_for
from launcher.core.file_lock import is_locked
from launcher.core.installation import find_missing, find_missing_for_training, make_missing_error
from launcher.core.processes import LAUNCHER_TERMINAL, make_child_environment
from launcher.core.run_paths import RunPaths
from launcher.hardware.model import Hardware, format_hardware
from launcher.hardware.probe import probe_hardware
from launcher.launch.console import Console, Relay
from launcher.launch.exit_status import (
    describe_dead_ranks,
    explain_missing_nodes,
    find_exit_code,
    is_out_of_memory,
    make_node_outcome,
    make_outcome,
)
from launcher.launch.multi_agent import make_argv
from launcher.launch.nodes import JOIN_FLAGS, Node, check_node
from launcher.launch.supervise import ChildExit, Timeouts, collect_signals, supervise
from launcher.launch.write_run import find_train_script
from launcher.plan.model import Plan
from launcher.render import Command, render_command
from launcher.render.accelerate import make_single_process_environment
from launcher.render.spec import make_launch_spec
from launcher.runs.record import Outcome, load_outcome, write_outcome

# By this Python, not by the first `accelerate` on the PATH.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
_SINGLE_PROCESS = (sys.executable, "-I", "-S", str(Path(__file__).with_name("single_process.py")))

_RECORD_SECONDS = 5.0  # how long rank 0 may take, on another node, to write outcome.json
_POLL_SECONDS = 0.2


def check_packages(plan: Plan) -> None:
    """Raise InputError if a package that the plan needs is not installed, without importing any."""
    if missing := find_missing_for_training(plan.strategy):
        raise make_missing_error("training", missing)
    absent = find_missing(plan.trackers)
    if absent:
        raise InputError(
            f"training.config.report_to names trackers whose packages are not installed: {', '.join(absent)}",
            hint=f"pip install 'expert-launcher[{','.join(absent)}]', or --report-to with other trackers",
        )
    if "mlflow" in plan.trackers and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise InputError(
            "training.config.report_to names mlflow, but MLFLOW_TRACKING_URI is not set",
            hint="export MLFLOW_TRACKING_URI=http://HOST:5000 (or a sqlite:///FILE; needs the full package mlflow)",
        )


def check_startable(plan: Plan, node: Node | None = None) -> None:
    """Raise InputError if a plan cannot start here: it is for other hardware, or for several nodes without a `node`."""
    planned = plan.hardware
    if planned.nodes > 1 and node is None:
        raise InputError(
            f"this plan is for {format_hardware(planned)}; `launcher train` starts one node",
            hint=f"on each of them: {JOIN_FLAGS}; --on slurm|skypilot|kubernetes|dstack submits it; "
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
            hint="--dry-run writes the files to copy to that machine; omit --gpu to plan for this machine",
        )


def _is_part_of(planned: Hardware, here: Hardware) -> bool:
    keys = [None if hardware.gpu is None else hardware.gpu.key for hardware in (planned, here)]
    return keys[0] == keys[1] and planned.gpus_per_node <= here.gpus_per_node


def start_run(
    plan: Plan,
    paths: RunPaths,
    console: Console,
    *,
    nodes: Sequence[Node] = (),
    script: str | None = None,
    script_args: Sequence[str] = (),
    accelerate: Sequence[str] | None = None,
    timeouts: Timeouts | None = None,
) -> Outcome:
    """Start the training of a run directory, wait for its last process, and return the final outcome.

    `nodes` are the nodes of a multi-node training that this machine runs: one, or all of them in a rehearsal. They are
    empty for a single-node training.
    """
    started_at = datetime.now(UTC)
    commands = [
        replace(command, argv=(*command.argv, *script_args))
        for command in _render_commands(plan, paths, nodes, script or find_train_script(), accelerate)
    ]
    environment = _make_environment(commands[0], console, os.environ)
    argv = make_argv([command.argv for command in commands])
    keeps_record = not nodes or any(node.keeps_record for node in nodes)
    received: list[int] = []
    with collect_signals(received.append):  # before a file is written: a signal must not leave a run without outcome
        if keeps_record:
            _reopen_outcome(paths)
        relay = _open_relay(console, paths)
        try:
            child = supervise(argv, environment, relay, lambda: _load_final(paths) is not None, received, timeouts)
            missing = explain_missing_nodes(paths, child, nodes[0], plan.hardware.nodes) if nodes else None
            if keeps_record:
                return _collect_outcome(paths, child, relay, started_at, missing)
            return _collect_remote_outcome(paths, child, nodes[0], relay, started_at, missing)
        finally:
            relay.close()


def _collect_outcome(
    paths: RunPaths, child: ChildExit, relay: Relay, started_at: datetime, missing: RunFailedError | None
) -> Outcome:
    """Return the outcome that the training has written, or write one for a training that could not."""
    outcome = _load_final(paths)
    if outcome is not None and outcome.exit_code == ExitCode.RUN_FAILED:
        outcome = _add_cause(paths, outcome, child, relay)
    if missing is None and (outcome is None or not outcome.exit_code):
        relay.release()
    if outcome is None and find_exit_code(child) == ExitCode.WRONG_INPUT and is_locked(paths.lock):
        # Another process is training this run, and keeps its record.
        return make_outcome(paths, child, None, started_at)
    if outcome is None:
        outcome = make_outcome(paths, child, load_outcome(paths.outcome), started_at)
        outcome = outcome if missing is None else outcome.model_copy(update={"error": str(missing)})
        relay.log(f"error: {outcome.error}")
        _try_to_write(paths, outcome, relay)
    return outcome


def _add_cause(paths: RunPaths, outcome: Outcome, child: ChildExit, relay: Relay) -> Outcome:
    """Add to rank 0's outcome why another rank ended, which only torch's agent reports: out of memory, or a signal."""
    if is_out_of_memory(child):
        changes: dict[str, object] = {
            "exit_code": int(ExitCode.DOES_NOT_FIT),
            "error": "another rank ran out of memory",
        }
    elif dead := describe_dead_ranks(child):
        relay.log(f"error: {dead}")
        changes = {"error": f"{dead}\n{outcome.error}"}
    else:
        return outcome
    explained = outcome.model_copy(update=changes)
    _try_to_write(paths, explained, relay)
    return explained


def _render_commands(
    plan: Plan, paths: RunPaths, nodes: Sequence[Node], script: str, accelerate: Sequence[str] | None
) -> list[Command]:
    spec = make_launch_spec(plan)
    if not nodes and not spec.has_agent and accelerate is None:
        command = render_command(plan, paths, script=script, accelerate=_SINGLE_PROCESS)
        return [replace(command, environment={**command.environment, **make_single_process_environment(spec)})]
    accelerate = ACCELERATE if accelerate is None else accelerate
    if not nodes:
        return [render_command(plan, paths, script=script, accelerate=accelerate)]
    return [
        render_command(
            plan,
            paths,
            rendezvous=node.rendezvous,
            machine_rank=node.rank if node.rendezvous.backend == "static" else None,  # torch would warn and ignore it
            script=script,
            accelerate=accelerate,
        )
        for node in nodes
    ]


def _make_environment(command: Command, console: Console, inherited: Mapping[str, str]) -> dict[str, str]:
    # Kubeflow Trainer sets PET_* for torchrun, which would take them as defaults of flags that are not ours.
    kept = {name: value for name, value in inherited.items() if not name.startswith("PET_")}
    environment = make_child_environment({**kept, **command.environment})
    environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe is block-buffered
    environment.pop(LAUNCHER_TERMINAL, None)
    if console.columns is not None:
        environment |= {LAUNCHER_TERMINAL: "1", "COLUMNS": str(console.columns)}
    return environment


def _collect_remote_outcome(
    paths: RunPaths,
    child: ChildExit,
    node: Node,
    relay: Relay,
    started_at: datetime,
    missing: RunFailedError | None,
) -> Outcome:
    """Return the outcome on a node where rank 0 may not run: rank 0's outcome.json if present, else its own."""
    running = load_outcome(paths.outcome)
    is_late = running is not None and child.returncode > 0  # a killed agent is itself the reason
    deadline = time.monotonic() + (_RECORD_SECONDS if is_late else 0.0)
    while (outcome := _load_final(paths)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if outcome is None or child.returncode < 0:
        outcome = make_node_outcome(paths, child, running, started_at, node)
        outcome = outcome if missing is None else outcome.model_copy(update={"error": str(missing)})
    if not outcome.exit_code:
        relay.release()
    elif outcome.error:
        # Only the last line of a traceback: the rank that raised it has printed it, perhaps on another node.
        message = outcome.error.splitlines()[-1] if outcome.error.startswith("Traceback") else outcome.error
        if message.splitlines()[0] not in relay.tail:
            relay.log(f"error: {message}")
    return outcome


def _open_relay(console: Console, paths: RunPaths) -> Relay:
    try:
        return Relay(console, paths.console_log)
    except OSError as error:
        raise InputError(f"{paths.console_log} cannot be written: {error.strerror}", hint=hint_for(error)) from None


def _try_to_write(paths: RunPaths, outcome: Outcome, relay: Relay) -> None:
    """Write outcome and report, but never raise: a full disk may have ended the run, and its exit code must be kept."""
    try:
        write_outcome(paths.outcome, outcome)
    except InputError as error:
        relay.log(f"warning: {error}")
        return
    from launcher.analysis.report import write_report  # takes 0.1 s to import, and most runs write their own report

    write_report(paths)


def _reopen_outcome(paths: RunPaths) -> None:
    """Mark a run that ended earlier as running again."""
    outcome = _load_final(paths)
    if outcome is not None:
        changes = {"status": "running", "exit_code": None, "error": "", "ended_at": None, "pid": os.getpid()}
        write_outcome(paths.outcome, outcome.model_copy(update=changes))


def _load_final(paths: RunPaths) -> Outcome | None:
    outcome = load_outcome(paths.outcome)
    return outcome if outcome is not None and outcome.is_final else None
