"""Start the processes that log this run to its trackers, and wait for them at the end, up to a limit."""

from __future__ import annotations

import os
import shlex
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

_WANDB_MODULE = "launcher.training.tracking.wandb_uploader"
_OTHER_MODULE = "launcher.training.tracking.tracker_uploader"
_OFFLINE_SECONDS, _ONLINE_SECONDS = 20.0, 60.0
TITLES = {"tensorboard": "TensorBoard", "mlflow": "MLflow"}


class TrackerProcess:
    """A running uploader of this node."""

    def __init__(self, process: subprocess.Popen[bytes], title: str, limit_seconds: float, command: str) -> None:
        """Wrap the process of an uploader; `command` is the shell command with which users complete its upload."""
        self._process, self._title, self._limit, self._command = process, title, limit_seconds, command

    def finish(self) -> None:
        """Wait for the upload, which the end of a container would interrupt. Call this after writing outcome.json."""
        try:
            with _interruptible():
                code = self._process.wait(self._limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            log.info(
                f"{self._title}: upload not finished yet; if its process is killed, complete it with: {self._command}"
            )
            return
        if code != 0:
            log.info(f"{self._title}: upload incomplete (exit code {code}); complete it with: {self._command}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT, SIGTERM or SIGUSR1, so that they end the wait for an upload."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def start_trackers(plan: Plan, paths: RunPaths, accelerator: Accelerator) -> tuple[TrackerProcess, ...]:
    """Start this node's uploaders; return rank 0's, whose uploads are waited for. Every rank must call this."""
    started = [_start_wandb(plan, paths, accelerator)]
    for name in plan.trackers if accelerator.is_main_process else ():
        started.append(_start(TITLES[name], _OTHER_MODULE, [str(paths.root), "--to", name], _ONLINE_SECONDS))
    return tuple(one for one in started if one is not None and accelerator.is_main_process)


def _start_wandb(plan: Plan, paths: RunPaths, accelerator: Accelerator) -> TrackerProcess | None:
    """Start one W&B uploader per node. Rank 0's logs the metrics, others system metrics only."""
    tracking = decide_tracking(plan.wandb.mode, os.environ, is_requested=plan.wandb.is_requested)
    arguments = [str(paths.root)]
    run_id = None
    if plan.hardware.nodes > 1:  # all nodes log to one run, even if their environments differ
        trace = load_trace(paths)
        own_id = None if tracking.mode != "online" else trace.id if trace else make_id(paths.run_id)
        run_id = broadcast_object(accelerator, own_id)
        arguments += [] if run_id is None else ["--id", run_id]
    if accelerator.is_main_process and tracking.mode != "disabled":
        limit = _ONLINE_SECONDS if tracking.mode == "online" else _OFFLINE_SECONDS
        return _start("W&B", _WANDB_MODULE, arguments, limit)
    if accelerator.is_local_main_process and run_id is not None and tracking.mode == "online":
        node = os.environ.get("GROUP_RANK", "1")
        return _start("W&B", _WANDB_MODULE, [*arguments, "--node", node], _ONLINE_SECONDS)
    return None


def _start(title: str, module: str, arguments: list[str], limit_seconds: float) -> TrackerProcess | None:
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--parent", str(os.getpid())],
            env=make_child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training
        )
    except OSError as error:
        log.warning(f"this run is not logged to {title}: {error}")
        return None
    again = [Path(sys.executable).name, "-m", module, *arguments]
    return TrackerProcess(process, title, limit_seconds, shlex.join(again))
