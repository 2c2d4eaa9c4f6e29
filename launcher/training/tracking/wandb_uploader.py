"""Log a run to W&B: `python -m launcher.training.tracking.wandb_uploader RUN_DIR`.

It reads only files that the training writes (plan.json, metrics.jsonl, outcome.json). A server that does not respond, a
full queue or an error here can therefore not hold up the training; and if the training is killed, every row that it
wrote is still logged.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

from launcher.core.errors import ExitCode, LauncherError, first_line
from launcher.core.log import get_logger
from launcher.core.run_paths import RunPaths
from launcher.plan import Plan, load_plan
from launcher.runs.record import Outcome, WandbTrace, load_outcome
from launcher.runs.wandb_settings import (
    EPOCH_AXIS,
    STEP_AXIS,
    decide_tracking,
    get_project,
    load_trace,
    make_config,
    make_id,
    make_summary,
    write_trace,
)
from launcher.training.tracking.follow_run import POLL_SECONDS, MetricsTail, detach_uploader, has_ended
from launcher.training.tracking.wandb_run import (
    NotSharedError,
    ServerUnusableError,
    log_artifacts,
    open_run,
    read_manifest,
)

log = get_logger(__name__)

LOG = "wandb.log"
_MODULE = "launcher.training.tracking.wandb_uploader"
_SERVER_VARIABLES = (
    "WANDB_API_KEY",
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_CREDENTIALS_FILE",
    "WANDB_BASE_URL",
    "WANDB_CONFIG_DIR",
    "WANDB_INSECURE_DISABLE_SSL",
)
_SAVE_TRACE_SECONDS = 5.0
_MAX_RESTARTS = 3  # after W&B's own service has died
_FINISH_SECONDS = 300.0  # for the final upload; the training waits for less


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--parent", type=int, default=0, help="process id of the training; 0: log what is there and exit"
    )
    parser.add_argument("--node", type=int, default=0, help="node rank; only node 0 logs metrics")
    parser.add_argument("--id", dest="run_id", help="W&B run id, if another node has chosen it")
    parser.add_argument("--restarts", type=int, default=0, help="how often the uploader has restarted itself")
    parser.add_argument("--alone", dest="is_alone", action="store_true", help="other nodes do not log to this run")
    parser.add_argument("--offline-reason", default="", help="log offline for this reason")
    return parser.parse_args()


def main() -> int:
    """Log the run until it ends; falls back to offline mode, and restarts after a failure of W&B's service."""
    options = parse_options()
    paths = RunPaths(options.run_dir)
    environment = dict(os.environ)  # before WANDB_* variables are removed
    console_fd = detach_uploader(paths.logs / LOG, options.parent)
    trace = load_trace(paths)

    def restart(*more: str) -> NoReturn:
        """Replace this process, which stays the training's child: wandb cannot be initialized twice in one process."""
        sys.stderr.flush()
        os.dup2(console_fd, 2)
        # The last value of an option counts.
        os.execve(sys.executable, [sys.executable, "-m", _MODULE, *sys.argv[1:], *more], environment)

    try:
        return Uploader(paths, load_plan(paths.plan), options, trace).run()
    except LauncherError as error:
        log.info(f"W&B: run not logged: {error}")
        return int(ExitCode.RUN_FAILED)
    except (ServerUnusableError, NotSharedError) as error:
        if options.node:
            return int(ExitCode.DONE)  # node 0 reports the reason
        restart("--restarts", "0", "--alone", *(["--offline-reason", str(error)] if str(error) else []))
    except Exception as error:  # raised by wandb, of any type
        cause = f"{type(error).__name__}: {first_line(error)}"
        reset_trace(paths, trace)
        if options.restarts < _MAX_RESTARTS:
            restart("--restarts", str(options.restarts + 1))
        if not options.offline_reason:
            restart("--restarts", "0", "--offline-reason", f"the wandb service failed: {cause}")
        log.info(f"W&B: logging stopped: {cause}; see {paths.logs / LOG}")
        return int(ExitCode.DONE)  # reported


class Uploader:
    """Logs metrics, config and outcome of a run directory to one W&B run."""

    def __init__(self, paths: RunPaths, plan: Plan, options: argparse.Namespace, previous: WandbTrace | None) -> None:
        """Prepare to log a run; `previous` is the wandb.json of an earlier attempt."""
        self._paths, self._plan, self._options, self._previous = paths, plan, options, previous
        self._trace_saved_at = time.monotonic()
        self._logged_facts: tuple[object, ...] = ()

    def run(self) -> int:
        """Open the W&B run, log until the training ends, and finish the W&B run."""
        wandb = self._plan.wandb
        tracking = decide_tracking(wandb.mode, os.environ, is_requested=wandb.is_requested)
        if tracking.mode == "disabled":
            return 0
        options, previous = self._options, self._previous
        mode: Literal["online", "offline"] = "offline" if options.offline_reason else tracking.mode
        place = get_project(wandb, os.environ)
        clean_environment(is_online=mode == "online")
        run = open_run(
            self._plan,
            self._paths,
            place,
            run_id=options.run_id or (previous.id if previous else make_id(self._paths.run_id)),
            mode=mode,
            node=options.node,
            is_shared=self._plan.hardware.nodes > 1 and not options.is_alone,
        )
        if options.node:
            while os.getppid() == options.parent:  # the outcome may be on node 0's disk only
                time.sleep(POLL_SECONDS)
        else:
            known = previous if previous is not None and previous.id == run.id else None
            if not options.restarts:
                log.info(
                    self._announce(run, mode, options.offline_reason or tracking.reason, is_known=known is not None)
                )
            self._trace = save_trace(self._paths, known, run, place.project, mode)
            self._follow(run)
        self._finish(run)
        return 0

    def _announce(self, run: Any, mode: str, reason: str, *, is_known: bool) -> str:
        """Return the console message that says where the run is logged, or how to upload an offline run."""
        if mode == "online":
            return f"W&B: {'resumed' if is_known else 'logging to'} {run.url}"
        root = shlex.quote(str(self._paths.root))
        return f"W&B: offline ({reason}); upload it with: wandb sync {root}/wandb/offline-run-*"

    def _follow(self, run: Any) -> None:
        """Log metrics and run metadata to W&B until the training has ended."""
        tail = MetricsTail(self._paths.metrics, logged_seconds=self._trace.told_seconds)
        while True:
            outcome = load_outcome(self._paths.outcome)
            is_over = has_ended(self._options.parent, outcome)  # checked first: rows written before the end are read
            for row in tail.read():
                run.log({**row.values, STEP_AXIS: row.step, EPOCH_AXIS: row.epoch})
            if outcome is not None:
                self._log_facts(run, outcome)
            self._update_trace(tail.logged_seconds, at_once=is_over)
            if is_over:
                return
            time.sleep(POLL_SECONDS)

    def _log_facts(self, run: Any, outcome: Outcome) -> None:
        """Update the config once data and model are ready, and after each OOM fallback."""
        facts = (outcome.data_key, outcome.num_steps, len(outcome.oom_fallbacks))
        if outcome.data_key is None or facts == self._logged_facts:
            return
        self._logged_facts = facts
        config = make_config(load_plan(self._paths.plan), read_manifest(self._paths), outcome)
        process = {"observed": outcome.observed, "versions": outcome.versions, "git_commit": outcome.git_commit}
        run.config.update({**config, **process, "num_steps": outcome.num_steps}, allow_val_change=True)

    def _update_trace(self, logged_seconds: float, *, at_once: bool) -> None:
        if not at_once and time.monotonic() - self._trace_saved_at < _SAVE_TRACE_SECONDS:
            return
        self._trace_saved_at = time.monotonic()
        if logged_seconds > self._trace.told_seconds:
            self._trace = self._trace.model_copy(update={"told_seconds": logged_seconds})
            with suppress(LauncherError):  # disk full: rows are logged again after a restart
                write_trace(self._paths, self._trace)

    def _finish(self, run: Any) -> None:
        """Log summary and artifacts. A training that ended without a final outcome has crashed."""
        outcome = load_outcome(self._paths.outcome)
        if outcome is not None and not outcome.is_final:
            outcome = outcome.model_copy(update={"status": "crashed", "exit_code": int(ExitCode.RUN_FAILED)})
        limit = threading.Timer(_FINISH_SECONDS, lambda: os._exit(int(ExitCode.RUN_FAILED)))
        limit.daemon = True
        limit.start()
        if outcome is not None and not self._options.node:
            run.summary.update(make_summary(self._paths, outcome))
            if outcome.status == "stopped":
                run.mark_preempting()
            if outcome.status == "done":
                log_artifacts(run, self._plan, self._paths)
        run.finish(exit_code=1 if outcome is None or outcome.exit_code is None else outcome.exit_code)


def clean_environment(*, is_online: bool) -> None:
    """Remove WANDB_* variables that belong to other runs; keep only those needed to reach the server."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        if not (is_online and name in _SERVER_VARIABLES):
            del os.environ[name]
    os.environ["WANDB_SILENT"] = "true"  # messages to users are printed here


def save_trace(
    paths: RunPaths, known: WandbTrace | None, run: Any, project: str, mode: Literal["online", "offline"]
) -> WandbTrace:
    """Write wandb.json, which identifies the W&B run. `known` is its previous content; None logs all rows again."""
    folders = () if known is None else known.folders
    if mode == "offline":
        folders = (*folders, f"wandb/{Path(run.settings.sync_dir).name}")
    trace = WandbTrace(
        id=run.id,
        project=project,
        mode=mode,
        url=run.url if mode == "online" else None,
        folders=folders,
        told_seconds=0.0 if known is None else known.told_seconds,
    )
    with suppress(LauncherError):
        write_trace(paths, trace)
    return trace


def reset_trace(paths: RunPaths, previous: WandbTrace | None) -> None:
    """Mark the rows of this process as not logged: they may be lost with the service that died."""
    trace = load_trace(paths)
    if trace is not None:
        logged_seconds = 0.0 if previous is None else previous.told_seconds
        with suppress(LauncherError):
            write_trace(paths, trace.model_copy(update={"told_seconds": logged_seconds}))


if __name__ == "__main__":
    status = main()
    os._exit(status)  # skips wandb's messages at exit
