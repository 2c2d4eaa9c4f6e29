"""How a training ended that could not say so itself: what its agent's last words and the signals tell."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from launcher.errors import ExitCode, RunFailedError
from launcher.paths import RunPaths
from launcher.record import Outcome, Status
from launcher.supervise import Ending

# accelerate's words about its one process, and torch's agent's, whose root cause comes last.
_SIGNAL = re.compile(r"died with <Signals\.(SIG\w+): \d+>|exitcode +: -\d+ \(pid: \d+\) +\((SIG\w+)\)")
_CODE = re.compile(r"returned non-zero exit status (\d+)|exitcode +: (\d+) \(pid: \d+\)")


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


def _explain(paths: RunPaths, ending: Ending) -> tuple[Status, ExitCode, RunFailedError]:
    log = f"its log is {paths.console_log}"
    if ending.was_asked and ending.was_forced:
        error = RunFailedError("the training was stopped at once: what it did since its last checkpoint is lost")
        return "stopped", ExitCode.PREEMPTED, error
    name = _find_signal(ending)
    if name == "SIGKILL" and not ending.was_forced:
        hint = f"usually the kernel's OOM killer, when the machine's memory is full: see dmesg; {log}"
        error = RunFailedError("the training was killed (SIGKILL)", hint=hint)
    elif name is not None:
        error = RunFailedError(f"the training died of {name}", hint=log)
    else:
        error = RunFailedError(f"the training ended with {_name_code(ending)} and left no outcome", hint=log)
    return "crashed", ExitCode.RUN_FAILED, error


def _find_signal(ending: Ending) -> str | None:
    found = list(_SIGNAL.finditer(ending.stderr_tail))
    if found:
        return found[-1][1] or found[-1][2]
    return ending.signal_name


def _name_code(ending: Ending) -> str:
    found = list(_CODE.finditer(ending.stderr_tail))
    return f"exit code {(found[-1][1] or found[-1][2]) if found else ending.returncode}"
