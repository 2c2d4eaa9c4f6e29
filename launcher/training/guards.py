"""What may end a training from outside: signals, and a launcher that died."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from launcher.processes import LAUNCHER_PID, is_alive
from launcher.training.observers.base import Observer

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LOOK_EVERY_SECONDS = 1.0
# A scheduler signals all processes of a job: ours, and those that pass a signal on to us. That is one wish, not two.
_TOGETHER_SECONDS = 2.0


class StopOnSignal(Observer):
    """The first signal ends the training after the step it is in; a second one ends it at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0

    def install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def asks_to_stop(self) -> bool:
        return self.received is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
        elif number != signal.SIGUSR1 and time.monotonic() - self._received_at > _TOGETHER_SECONDS:
            raise KeyboardInterrupt


def end_with_parents() -> None:
    """No orphan trains on: where the agent or the launcher that started us is gone, so are we, within a second or two.

    A killed agent alone would leave its worker training, and the other nodes waiting for it.
    """
    pid = os.environ.get(LAUNCHER_PID, "")
    launcher = int(pid) if pid.isdigit() else None
    parent = os.getppid()
    if parent == 1 and "TORCHELASTIC_RUN_ID" in os.environ and not _is_python(parent):
        os._exit(1)  # our agent was killed while we started: init has adopted us already
    threading.Thread(target=_watch, args=(parent, launcher), daemon=True).start()


def _watch(parent: int, launcher: int | None) -> None:
    while os.getppid() == parent and (launcher is None or is_alive(launcher)):
        time.sleep(_LOOK_EVERY_SECONDS)
    os._exit(1)


def _is_python(pid: int) -> bool:
    """Ours: in a container the agent may be the first process of all."""
    try:
        return Path(f"/proc/{pid}/exe").samefile("/proc/self/exe")
    except OSError:
        return False
