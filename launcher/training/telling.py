"""Starts the process that tells Weights & Biases of this run, and waits for it at the end: only so long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from accelerate import Accelerator

from launcher.errors import say
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.processes import make_child_environment
from launcher.tracking import decide_tracking, load_trace, make_id
from launcher.training.handing import hand_out

_OFFLINE_SECONDS, _ONLINE_SECONDS = 20.0, 60.0


class Teller:
    def __init__(self, process: subprocess.Popen[bytes], root: Path, limit_seconds: float, *, is_main: bool) -> None:
        self._process, self._root, self._limit, self._is_main = process, root, limit_seconds, is_main

    def finish(self) -> None:
        """The outcome is written: it tells what is left and ends. A container that ends with us would end it, too."""
        if not self._is_main:  # it ends with us
            return
        try:
            with _interruptible():
                code = self._process.wait(self._limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            said = "W&B: not all is uploaded yet; `wandb sync` does it from what lies in the run's directory"
            say(said)
            return
        if code != 0:
            again = f"{Path(sys.executable).name} -m launcher.training.uplink {self._root}"
            say(f"W&B: not all was told (exit code {code}); the rest by: {again}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """The run is over: any signal ends the waiting, and nothing else."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_teller(plan: Plan, paths: RunPaths, accelerator: Accelerator) -> Teller | None:
    """Every rank must call it. The first rank's tells everything; on other nodes one tells of that machine."""
    tracking = decide_tracking(plan.wandb.mode, os.environ)
    run_id = None
    if plan.hardware.nodes > 1:  # all nodes must know the run; what each of them has in its environment may differ
        before = load_trace(paths)
        chosen = None if tracking.mode != "online" else before.id if before else make_id(paths.run_id)
        run_id = hand_out(accelerator, chosen)
    if accelerator.is_main_process and tracking.mode != "disabled":
        limit = _ONLINE_SECONDS if tracking.mode == "online" else _OFFLINE_SECONDS
        return _start(paths, run_id, node=0, limit_seconds=limit)
    if accelerator.is_local_main_process and run_id is not None and tracking.mode == "online":
        return _start(paths, run_id, node=int(os.environ.get("GROUP_RANK", "1")), limit_seconds=_ONLINE_SECONDS)
    return None


def _start(paths: RunPaths, run_id: str | None, *, node: int, limit_seconds: float) -> Teller | None:
    arguments = [str(paths.root), "--parent", str(os.getpid()), "--node", str(node)]
    arguments += [] if run_id is None else ["--id", run_id]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.training.uplink", *arguments],
            env=make_child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training
        )
    except OSError as error:
        say(f"warning: W&B is not told of this run: {error}")
        return None
    return Teller(process, paths.root, limit_seconds, is_main=node == 0)
