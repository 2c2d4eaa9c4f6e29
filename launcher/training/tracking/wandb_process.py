"""Starts the process that logs this run to Weights & Biases, and waits for it at the end, up to a limit."""

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

from launcher.core.log import get_logger
from launcher.core.processes import make_child_environment
from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.runs.wandb_settings import decide_tracking, load_trace, make_id
from launcher.training.engine.collectives import broadcast_object

log = get_logger(__name__)

_MODULE = "launcher.training.tracking.wandb_uploader"
_OFFLINE_SECONDS, _ONLINE_SECONDS = 20.0, 60.0


class WandbProcess:
    """The running uploader of this node."""

    def __init__(self, process: subprocess.Popen[bytes], root: Path, limit_seconds: float, *, is_main: bool) -> None:
        """`root` is the run directory; only the main one is waited for."""
        self._process, self._root, self._limit, self._is_main = process, root, limit_seconds, is_main

    def finish(self) -> None:
        """Wait until the rest is uploaded: the end of a container would kill the uploader. Call after the outcome."""
        if not self._is_main:  # it ends with us
            return
        try:
            with _interruptible():
                code = self._process.wait(self._limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            log.info("W&B: upload incomplete; complete it with `wandb sync` in the run directory")
            return
        if code != 0:
            command = f"{Path(sys.executable).name} -m {_MODULE} {self._root}"
            log.info(f"W&B: upload incomplete (exit code {code}); complete it with: {command}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let any stop signal end the wait; the run itself is over."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def start_wandb_process(plan: Plan, paths: RunPaths, accelerator: Accelerator) -> WandbProcess | None:
    """Start one uploader per node; every rank must call this. Rank 0's logs the metrics, others system metrics only."""
    tracking = decide_tracking(plan.wandb.mode, os.environ, is_requested=plan.wandb.is_requested)
    run_id = None
    if plan.hardware.nodes > 1:  # all nodes log to one run, even if their environments differ
        trace = load_trace(paths)
        own_id = None if tracking.mode != "online" else trace.id if trace else make_id(paths.run_id)
        run_id = broadcast_object(accelerator, own_id)
    if accelerator.is_main_process and tracking.mode != "disabled":
        limit = _ONLINE_SECONDS if tracking.mode == "online" else _OFFLINE_SECONDS
        return _start(paths, run_id, node=0, limit_seconds=limit)
    if accelerator.is_local_main_process and run_id is not None and tracking.mode == "online":
        return _start(paths, run_id, node=int(os.environ.get("GROUP_RANK", "1")), limit_seconds=_ONLINE_SECONDS)
    return None


def _start(paths: RunPaths, run_id: str | None, *, node: int, limit_seconds: float) -> WandbProcess | None:
    arguments = [str(paths.root), "--parent", str(os.getpid()), "--node", str(node)]
    arguments += [] if run_id is None else ["--id", run_id]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *arguments],
            env=make_child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training
        )
    except OSError as error:
        log.warning(f"this run is not logged to W&B: {error}")
        return None
    return WandbProcess(process, paths.root, limit_seconds, is_main=node == 0)
