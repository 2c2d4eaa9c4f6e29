"""One child process and all that it starts: run, watched, stopped politely or at once, and never left behind."""

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
from types import FrameType

from launcher.processes import LAUNCHER_PID, find_listeners, find_processes, send_signal
from launcher.relay import Relay

_MARK = "LAUNCHER_MARK"  # all processes of a run have it; a process id is not unique across containers

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_POLITE = signal.SIGUSR1  # finish the step, save, end

# accelerate would die of these and leave its training behind. What is ignored stays ignored across exec, and a wrapper
# does it in the child: were it done here around the start, a signal that came in that moment would be lost.
_IGNORING = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """In seconds."""

    kill: float = 10.0  # from SIGTERM to SIGKILL
    leftover: float = 30.0  # for what still runs when the child has ended of itself
    orphan: float = 120.0  # for a training whose agent was killed: it is asked to save
    held: float = 3.0  # how long a traceback waits for the run's end, where the training goes on
    pipes: float = 5.0
    poll: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    pid: int
    returncode: int
    was_asked: bool  # a user or a scheduler asked it to stop
    was_forced: bool  # we ended it by SIGTERM or SIGKILL
    stderr_tail: str

    @property
    def signal_name(self) -> str | None:
        """Of the signal that ended the child itself."""
        return signal.Signals(-self.returncode).name if self.returncode < 0 else None


def supervise(
    argv: Sequence[str],
    environment: Mapping[str, str],
    relay: Relay,
    has_ended: Callable[[], bool],
    limits: Limits | None = None,
) -> Ending:
    """Runs it to its end. `has_ended` tells whether the training has written down how it ended.

    The first stop signal is passed on once, as SIGUSR1; the second stops everything.
    """
    child = _Child(relay, has_ended, limits or Limits())
    with _caught(STOP_SIGNALS, child.received):
        try:
            child.start(argv, environment)
            child.watch()
        finally:
            child.clear()
    return child.make_ending()


class _Child:
    def __init__(self, relay: Relay, has_ended: Callable[[], bool], limits: Limits) -> None:
        self.received: list[int] = []
        self._relay = relay
        self._has_ended = has_ended
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = secrets.token_hex(16)
        self._is_asked = False  # to stop after the step
        self._is_told = False  # and the training has got the signal
        self._kill_at: float | None = None

    def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _IGNORING, *argv),
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
        while self._process.poll() is None and not self._is_hopeless():
            self._tick()
        was_killed = (self._process.returncode or 0) < 0
        if was_killed and not self._is_asked and self._find():
            self._ask()
            self._relay.say("the agent of this training was killed: stopping after this step")
        deadline = time.monotonic() + (self._limits.orphan if was_killed else self._limits.leftover)
        while self._find() and not self._is_hopeless():
            self._tick()
            if self._kill_at is None and time.monotonic() > deadline:
                self._force()

    def clear(self) -> None:
        """Nothing outlives us, not even when we fail ourselves."""
        deadline = time.monotonic() + self._limits.kill
        while (pids := self._find()) and time.monotonic() < deadline:
            send_signal(pids, signal.SIGKILL)
            time.sleep(self._limits.poll)
        if pids:
            self._relay.say(f"warning: these processes cannot be killed: {', '.join(map(str, pids))}")
        if self._process is not None:
            self._process.poll()
        self._relay.finish(self._limits.pipes)

    def make_ending(self) -> Ending:
        assert self._process is not None
        return Ending(
            pid=self._process.pid,
            returncode=-signal.SIGKILL if self._process.returncode is None else self._process.returncode,
            was_asked=bool(self.received),
            was_forced=self._kill_at is not None,
            stderr_tail=self._relay.tail,
        )

    def _tick(self) -> None:
        self._obey()
        if self._relay.held_seconds() > self._limits.held and not self._has_ended():
            self._relay.release()  # a warning of a run that goes on, not the end of one
        time.sleep(self._limits.poll)

    def _obey(self) -> None:
        # A terminal that closes may send SIGHUP twice, by the kernel and by the shell: it never means "at once".
        is_urgent = any(number != signal.SIGHUP for number in self.received[1:])
        if self._kill_at is not None:
            if time.monotonic() > self._kill_at:
                send_signal(self._find(), signal.SIGKILL)
        elif is_urgent:
            self._force()
            self._relay.say("stopping at once")
        elif self.received and not self._is_asked:
            self._ask()
            self._relay.say("stopping after this step (signal again to stop at once)")
        elif self._is_asked and not self._is_told:
            self._ask()

    def _ask(self) -> None:
        """Until the training listens there is nothing to save, and a signal would be lost: then ask again."""
        self._is_asked = True
        listeners = find_listeners(self._find(), _POLITE)
        send_signal(listeners, _POLITE)
        self._is_told = bool(listeners)

    def _force(self) -> None:
        """Those that listen get a moment to end well; a training that only starts has nothing to end."""
        pids = self._find()
        is_heard = bool(find_listeners(pids, signal.SIGTERM))
        self._kill_at = time.monotonic() + (self._limits.kill if is_heard else 0.0)
        send_signal(pids, signal.SIGTERM)

    def _is_hopeless(self) -> bool:
        """Stuck in the kernel, as by a GPU that hangs: not even SIGKILL ends that."""
        return self._kill_at is not None and time.monotonic() > self._kill_at + self._limits.kill

    def _find(self) -> tuple[int, ...]:
        return find_processes(f"{_MARK}={self._mark}")


@contextmanager
def _caught(numbers: Sequence[signal.Signals], received: list[int]) -> Iterator[None]:
    """Signals are noted, and obeyed in the loop. What our starter ignores (nohup, a job in the background) stays."""

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    optional = {signal.SIGINT, signal.SIGHUP}
    before = {
        number: signal.getsignal(number)
        for number in numbers
        if number not in optional or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
