"""Outcome of a training that wrote none itself, derived from its exit code, from signals and from torch's messages."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from datetime import UTC, datetime

from launcher.core import metrics
from launcher.core.errors import ExitCode, LauncherError, RunFailedError
from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths, format_resume_command
from launcher.launch.nodes import Node
from launcher.launch.supervise import ChildExit
from launcher.runs.record import Outcome, Status

# Messages of single_process.py and accelerate, and of torch's agent, whose root cause comes last.
_SIGNAL = re.compile(r"died with <Signals\.(SIG\w+): \d+>|exitcode +: -\d+ \(pid: \d+\) +\((SIG\w+)\)")
# Errors of torch when the agents of several nodes do not meet.
_NO_RENDEZVOUS = re.compile(r"RendezvousTimeoutError|RendezvousConnectionError|DistStoreError|DistNetworkError")
_JOINED = re.compile(r"(\d+)/(\d+) clients joined")
_RANK = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+(?:\S+:)?\s*exitcode +: -(\d+) \(pid: (\d+)\)")
# Only our ranks exit with these codes, and all of them do: they are the same on every node.
_CODES_OF_RANKS = (ExitCode.DOES_NOT_FIT, ExitCode.RUN_FAILED, ExitCode.WRONG_TOPOLOGY)
_CODE = re.compile(r"returned non-zero exit status (\d+)|exitcode +: (\d+) \(pid: \d+\)")
# A training with these codes has printed its message before it could write an outcome.
_CODES_WITH_MESSAGE = (ExitCode.WRONG_INPUT, ExitCode.WRONG_TOPOLOGY)


def make_outcome(paths: RunPaths, child: ChildExit, running: Outcome | None, started_at: datetime) -> Outcome:
    """Return the final outcome of a training that did not write one, keeping what it had recorded."""
    known = running or Outcome(
        run_id=paths.run_id, status="running", pid=child.pid, started_at=started_at.isoformat(timespec="seconds")
    )
    status, code, error = _explain(paths, child)
    ended_at = datetime.now(UTC).isoformat(timespec="seconds")
    return known.model_copy(
        update={
            "status": status,
            "exit_code": int(code),
            "error": str(error),
            "ended_at": ended_at,
            **_read_progress(paths),
        }
    )


def _read_progress(paths: RunPaths) -> dict[str, object]:
    """Return the number of trained steps and the last loss from metrics.jsonl, for the outcome of a killed training."""
    with suppress(LauncherError, OSError):
        steps = [row for row in load_metrics(paths.metrics, max_bytes=None) if metrics.TRAIN_LOSS in row.values]
        if steps:
            return {"steps_done": steps[-1].step, "final_loss": steps[-1].values[metrics.TRAIN_LOSS]}
    return {}


def make_node_outcome(
    paths: RunPaths, child: ChildExit, running: Outcome | None, started_at: datetime, node: Node
) -> Outcome:
    """Return the outcome of a training on a node without rank 0, where no outcome.json is written."""
    outcome = make_outcome(paths, child, running, started_at)
    code = find_exit_code(child)
    if child.returncode == 0:
        return outcome.model_copy(update={"status": "done", "exit_code": int(ExitCode.DONE), "error": ""})
    if code == ExitCode.PREEMPTED:
        return outcome.model_copy(update={"status": "stopped", "exit_code": int(ExitCode.PREEMPTED), "error": ""})
    if outcome.status == "stopped" or _find_signal(child) is not None:
        return outcome
    error = RunFailedError(
        f"node {node.rank}: its ranks ended with exit code {code}",
        hint=f"rank 0 reports the reason, usually on node 0; this node's log is {paths.console_log}",
    )
    update: dict[str, object] = {"error": str(error)}
    if code in _CODES_OF_RANKS:
        update |= {"status": "failed", "exit_code": code}
    return outcome.model_copy(update=update)


def explain_missing_nodes(paths: RunPaths, child: ChildExit, node: Node, num_nodes: int) -> RunFailedError | None:
    """Return an error that says which or how many nodes joined, if torch reports that some are missing; else None."""
    if not _NO_RENDEZVOUS.search(child.stderr_tail):
        return None
    joined = _JOINED.search(child.stderr_tail)
    who = f"; {joined[1]} of {joined[2]} joined" if joined else ""
    who = f"; node {1 - node.rank} did not join" if num_nodes == 2 else who
    return RunFailedError(
        f"the {num_nodes} nodes did not all join at {node.address} within "
        f"{node.rendezvous.join_timeout_seconds} s{who}",
        hint="start all of them with the same --rendezvous; --join-timeout waits longer; "
        f"this node's log is {paths.console_log}",
    )


def _explain(paths: RunPaths, child: ChildExit) -> tuple[Status, ExitCode, RunFailedError]:
    log = f"its log is {paths.console_log}"
    resume = f"`{format_resume_command(paths.root)}` continues the run"
    if child.stop_requested and child.was_forced:
        error = RunFailedError("the training was stopped at once: progress since its last checkpoint is lost")
        return "stopped", ExitCode.PREEMPTED, error
    if is_out_of_memory(child):
        return "failed", ExitCode.DOES_NOT_FIT, RunFailedError("a rank ran out of memory", hint=log)
    name = _find_signal(child)
    if name == "SIGKILL" and not child.was_forced:
        hint = f"usually the kernel's OOM killer, when the machine's memory is full: see dmesg; {log}; {resume}"
        error = RunFailedError("the training was killed (SIGKILL)", hint=hint)
    elif name is not None:
        error = RunFailedError(f"the training died of {name}", hint=f"{log}; {resume}")
    elif (code := find_exit_code(child)) in _CODES_WITH_MESSAGE:
        error = RunFailedError("the training ended before its first step: see its message above", hint=log)
        return "failed", ExitCode(code), error
    else:
        error = RunFailedError(f"the training ended with exit code {code} without recording its outcome", hint=log)
    return "crashed", ExitCode.RUN_FAILED, error


def _find_signal(child: ChildExit) -> str | None:
    matches = list(_SIGNAL.finditer(child.stderr_tail))
    return (matches[-1][1] or matches[-1][2]) if matches else child.signal_name


def find_exit_code(child: ChildExit) -> int:
    """Return the training's exit code: the one in the messages of torch's agent, else that of the process."""
    matches = list(_CODE.finditer(child.stderr_tail))
    return int(matches[-1][1] or matches[-1][2]) if matches else child.returncode


def is_out_of_memory(child: ChildExit) -> bool:
    """Whether a rank ran out of memory, by its exit code."""
    codes = (int(match[1] or match[2]) for match in _CODE.finditer(child.stderr_tail))
    return ExitCode.DOES_NOT_FIT in (child.returncode, *codes)


def describe_dead_ranks(child: ChildExit) -> str:
    """List the ranks that a signal killed, except those that torch's agent then ended with SIGTERM; empty if none."""
    ranks = {int(rank): (int(number), pid) for rank, number, pid in _RANK.findall(child.stderr_tail)}
    dead = [
        f"rank {rank} (process {pid}) died of {signal.Signals(number).name}"
        for rank, (number, pid) in sorted(ranks.items())
        if number != signal.SIGTERM
    ]
    return ", ".join(dead)
