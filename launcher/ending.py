"""How a training ended that could not say so itself: what its agent's last words and the signals tell."""

from __future__ import annotations

import re
import signal
from datetime import UTC, datetime

from launcher.errors import ExitCode, RunFailedError
from launcher.nodes import Node
from launcher.paths import RunPaths
from launcher.record import Outcome, Status
from launcher.supervise import Ending

# accelerate's words about its one process, and torch's agent's, whose root cause comes last.
_SIGNAL = re.compile(r"died with <Signals\.(SIG\w+): \d+>|exitcode +: -\d+ \(pid: \d+\) +\((SIG\w+)\)")
# torch's words where agents wait for each other, and wait in vain.
_NO_MEETING = re.compile(r"RendezvousTimeoutError|RendezvousConnectionError|DistStoreError|DistNetworkError")
_JOINED = re.compile(r"(\d+)/(\d+) clients joined")
_RANK = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+(?:\S+:)?\s*exitcode +: -(\d+) \(pid: (\d+)\)")
# By no other process than a rank of ours, and by all of them: the same on every node.
_SAID_BY_RANKS = (ExitCode.DOES_NOT_FIT, ExitCode.RUN_FAILED, ExitCode.WRONG_TOPOLOGY)
_CODE = re.compile(r"returned non-zero exit status (\d+)|exitcode +: (\d+) \(pid: \d+\)")

# Codes of a training that has said what is wrong before it could keep a record, or must not touch another's.
_TOLD = {int(ExitCode.WRONG_INPUT): "see its message above", int(ExitCode.WRONG_TOPOLOGY): "see its message above"}


def make_outcome(paths: RunPaths, ending: Ending, running: Outcome | None, started_at: datetime) -> Outcome:
    """A final outcome in place of the one that the training did not write; what it had noted by then is kept."""
    known = running or Outcome(
        run_id=paths.run_id, status="running", pid=ending.pid, started_at=started_at.isoformat(timespec="seconds")
    )
    status, code, error = _explain(paths, ending)
    ended_at = datetime.now(UTC).isoformat(timespec="seconds")
    return known.model_copy(
        update={"status": status, "exit_code": int(code), "error": str(error), "ended_at": ended_at}
    )


def make_node_outcome(
    paths: RunPaths, ending: Ending, running: Outcome | None, started_at: datetime, node: Node
) -> Outcome:
    """Of a node where rank 0 need not run, and which so has no record of its own."""
    outcome = make_outcome(paths, ending, running, started_at)
    if ending.returncode == 0:
        return outcome.model_copy(update={"status": "done", "exit_code": int(ExitCode.DONE), "error": ""})
    if find_exit_code(ending) == ExitCode.PREEMPTED:
        return outcome.model_copy(update={"status": "stopped", "exit_code": int(ExitCode.PREEMPTED), "error": ""})
    if outcome.status == "stopped" or _find_signal(ending) is not None:
        return outcome
    code = find_exit_code(ending)
    error = RunFailedError(
        f"node {node.rank}: its ranks ended with exit code {code}",
        hint=f"the first rank tells why, on node 0 as a rule; this node's log is {paths.console_log}",
    )
    update: dict[str, object] = {"error": str(error)}
    if code in _SAID_BY_RANKS:
        update |= {"status": "failed", "exit_code": code}
    return outcome.model_copy(update=update)


def find_absence(paths: RunPaths, ending: Ending, node: Node, num_nodes: int) -> RunFailedError | None:
    """Where no rank ever began because not all nodes came, which torch tells by a traceback: who is missing."""
    if not _NO_MEETING.search(ending.stderr_tail):
        return None
    joined = _JOINED.search(ending.stderr_tail)
    who = f"; {joined[1]} of {joined[2]} came" if joined else ""
    who = f"; node {1 - node.rank} did not come" if num_nodes == 2 else who
    limit = node.rendezvous.join_timeout_seconds
    return RunFailedError(
        f"the {num_nodes} nodes did not come together at {node.address} within {limit} s{who}",
        hint="start all of them with the same --rendezvous; --join-timeout waits longer; "
        f"this node's log is {paths.console_log}",
    )


def _explain(paths: RunPaths, ending: Ending) -> tuple[Status, ExitCode, RunFailedError]:
    log = f"its log is {paths.console_log}"
    if ending.was_asked and ending.was_forced:
        error = RunFailedError("the training was stopped at once: what it did since its last checkpoint is lost")
        return "stopped", ExitCode.PREEMPTED, error
    if tells_out_of_memory(ending):
        return "failed", ExitCode.DOES_NOT_FIT, RunFailedError("a rank ran out of memory", hint=log)
    name = _find_signal(ending)
    if name == "SIGKILL" and not ending.was_forced:
        hint = f"usually the kernel's OOM killer, when the machine's memory is full: see dmesg; {log}"
        error = RunFailedError("the training was killed (SIGKILL)", hint=hint)
    elif name is not None:
        error = RunFailedError(f"the training died of {name}", hint=log)
    elif (code := find_exit_code(ending)) in _TOLD:
        return "failed", ExitCode(code), RunFailedError(f"the training ended before it began: {_TOLD[code]}", hint=log)
    else:
        error = RunFailedError(f"the training ended with exit code {code} and left no outcome", hint=log)
    return "crashed", ExitCode.RUN_FAILED, error


def _find_signal(ending: Ending) -> str | None:
    found = list(_SIGNAL.finditer(ending.stderr_tail))
    if found:
        return found[-1][1] or found[-1][2]
    return ending.signal_name


def find_exit_code(ending: Ending) -> int:
    """The training's own, where its agent tells it: the agent itself turns every code into 1."""
    found = list(_CODE.finditer(ending.stderr_tail))
    return int(found[-1][1] or found[-1][2]) if found else ending.returncode


def tells_out_of_memory(ending: Ending) -> bool:
    """Whether any rank ended for want of memory, by what its agent tells of exit codes."""
    codes = (int(match[1] or match[2]) for match in _CODE.finditer(ending.stderr_tail))
    return ExitCode.DOES_NOT_FIT in codes


def name_dead_ranks(ending: Ending) -> str:
    """Ranks that a signal ended, by their agent's table. Those that the agent itself ended because of them say
    SIGTERM, or nothing."""
    found = {int(rank): (int(number), pid) for rank, number, pid in _RANK.findall(ending.stderr_tail)}
    dead = [
        f"rank {rank} (process {pid}) died of {signal.Signals(number).name}"
        for rank, (number, pid) in sorted(found.items())
        if number != signal.SIGTERM
    ]
    return ", ".join(dead)
