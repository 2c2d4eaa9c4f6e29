"""Supervision of a child process and everything it starts: signals, graceful and forced stops, no orphans."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from launcher.core.processes import LAUNCHER_PID, find_listeners, find_processes, send_signal
from launcher.launch.console import Relay

_MARK = "LAUNCHER_MARK"  # set for all processes of a run; process ids are not unique across containers

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_GRACEFUL = signal.SIGUSR1  # finish the step, save, exit

# accelerate would die of these signals and orphan its training. Ignored signals stay ignored across exec; a wrapper in
# the child ignores them, because a signal that arrives while the parent ignores them would be lost.
_IGNORE_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Time limits of a supervised child, in seconds."""

    kill: float = 10.0  # from SIGTERM to SIGKILL
    leftover: float = 30.0  # for processes that still run after the child has exited by itself
    orphan: float = 120.0  # for a training whose agent was killed, to save a checkpoint
    held: float = 10.0  # how long a traceback is held back while the training continues
    pipes: float = 5.0
    poll: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildExit:
    """How a supervised child ended."""

    pid: int
    returncode: int
    stop_requested: bool  # by a user or a scheduler
    was_forced: bool  # we ended it with SIGTERM or SIGKILL
    stderr_tail: str

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended the child, if one did."""
        return signal.Signals(-self.returncode).name if self.returncode < 0 else None


def supervise(
    argv: Sequence[str],
    environment: Mapping[str, str],
    relay: Relay,
    has_ended: Callable[[], bool],
    received: Sequence[int],
    timeouts: Timeouts | None = None,
) -> ChildExit:
    """Run a command until it and all its processes have ended. `has_ended` says whether the training wrote its outcome.

    `received` is filled by `collect_signals`, also before this call. The first stop signal is forwarded as SIGUSR1:
    finish the step and save. The second one stops everything.
    """
    child = _Child(relay, has_ended, received, timeouts or Timeouts())
    try:
        child.start(argv, environment)
        child.watch()
    finally:
        child.clear()
    return child.make_exit()


class _Child:
    def __init__(
        self, relay: Relay, has_ended: Callable[[], bool], received: Sequence[int], timeouts: Timeouts
    ) -> None:
        self._received = received
        self._relay = relay
        self._has_ended = has_ended
        self._timeouts = timeouts
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = secrets.token_hex(16)
        self._is_stopping = False  # requested to stop after the step
        self._is_delivered = False  # the training has got the signal
        self._kill_at: float | None = None

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _IGNORE_SIGNALS, *argv),
            env={**environment, LAUNCHER_PID: str(os.getpid()), _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is ours alone
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._relay.start(self._process.stdout, self._process.stderr)

    def watch(self) -> None:
        assert self._process is not None
        while self._process.poll() is None and not self._is_unkillable():
            self._tick()
        was_killed = (self._process.returncode or 0) < 0
        if was_killed and not self._is_stopping and self._list_pids():
            self._request_stop()
            self._relay.log("the agent of this training was killed: stopping after this step")
        deadline = time.monotonic() + (self._timeouts.orphan if was_killed else self._timeouts.leftover)
        while self._list_pids() and not self._is_unkillable():
            self._tick()
            if self._kill_at is None and time.monotonic() > deadline:
                self._force()

    def clear(self) -> None:
        """Kill all processes of the run that are left, also if the supervisor itself has failed."""
        deadline = time.monotonic() + self._timeouts.kill
        while (pids := self._list_pids()) and time.monotonic() < deadline:
            send_signal(pids, signal.SIGKILL)
            time.sleep(self._timeouts.poll)
        if pids:
            self._relay.log(f"warning: these processes cannot be killed: {', '.join(map(str, pids))}")
        if self._process is not None:
            self._process.poll()
        self._relay.finish(self._timeouts.pipes)

    def make_exit(self) -> ChildExit:
        assert self._process is not None
        return ChildExit(
            pid=self._process.pid,
            returncode=-signal.SIGKILL if self._process.returncode is None else self._process.returncode,
            stop_requested=bool(self._received),
            was_forced=self._kill_at is not None,
            stderr_tail=self._relay.tail,
        )

    def _tick(self) -> None:
        self._handle_signals()
        if self._relay.held_seconds() > self._timeouts.held and not self._has_ended():
            self._relay.release()  # a warning of a run that continues, not its end
        time.sleep(self._timeouts.poll)

    def _handle_signals(self) -> None:
        # A terminal that closes may send SIGHUP twice, from the kernel and from the shell: it never means "at once".
        is_urgent = any(number != signal.SIGHUP for number in self._received[1:])
        if self._kill_at is not None:
            if time.monotonic() > self._kill_at:
                send_signal(self._list_pids(), signal.SIGKILL)
        elif is_urgent:
            self._force()
            self._relay.log("stopping at once")
        elif self._received and not self._is_stopping:
            self._request_stop()
            self._relay.log("stopping after this step (signal again to stop at once)")
        elif self._is_stopping and not self._is_delivered:
            self._request_stop()

    def _request_stop(self) -> None:
        """Send SIGUSR1 (finish the step, save, exit) to processes that handle it; called again until there is one."""
        self._is_stopping = True
        listeners = find_listeners(self._list_pids(), _GRACEFUL)
        send_signal(listeners, _GRACEFUL)
        self._is_delivered = bool(listeners)

    def _force(self) -> None:
        """Send SIGTERM to all processes; SIGKILL follows after a timeout, or at once if none handles SIGTERM."""
        pids = self._list_pids()
        is_handled = bool(find_listeners(pids, signal.SIGTERM))
        self._kill_at = time.monotonic() + (self._timeouts.kill if is_handled else 0.0)
        send_signal(pids, signal.SIGTERM)

    def _is_unkillable(self) -> bool:
        """Return whether a process still runs long after SIGKILL, stuck in the kernel as with a hanging GPU."""
        return self._kill_at is not None and time.monotonic() > self._kill_at + self._timeouts.kill

    def _list_pids(self) -> tuple[int, ...]:
        return find_processes(f"{_MARK}={self._mark}")


@contextmanager
def collect_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call `note` with each stop signal that arrives; SIGINT and SIGHUP stay ignored if they were, as under nohup."""
    optional = {signal.SIGINT, signal.SIGHUP}
    before = {
        number: signal.getsignal(number)
        for number in STOP_SIGNALS
        if number not in optional or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        for number in before:
            signal.signal(number, lambda received, _frame: note(received))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
