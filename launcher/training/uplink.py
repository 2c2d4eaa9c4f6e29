"""`python -m launcher.training.uplink RUN_DIR`: a process beside a training that tells Weights & Biases of it.

It reads what the training has written (plan.json, metrics.jsonl, outcome.json) and nothing else, so a server that does
not answer, a full queue or an error in there cannot hold the training up; and where the training is killed, every row
that it wrote is told all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from launcher.errors import ExitCode, LauncherError, say
from launcher.metrics import StepMetrics
from launcher.paths import RunPaths
from launcher.plan import Plan, load_plan
from launcher.record import Outcome, WandbTrace, load_outcome
from launcher.tracking import (
    EPOCH_AXIS,
    STEP_AXIS,
    Tracking,
    decide_tracking,
    find_place,
    load_trace,
    make_config,
    make_id,
    write_trace,
)
from launcher.training.following import Follower
from launcher.training.quiet import hide_secrets
from launcher.training.wandb_run import (
    NotSharedError,
    Opened,
    Opening,
    ServerUnusableError,
    log_artifacts,
    open_run,
    summarise,
)

LOG = "wandb.log"
_KEPT_VARIABLES = (
    "WANDB_API_KEY",
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_CREDENTIALS_FILE",
    "WANDB_BASE_URL",
    "WANDB_CONFIG_DIR",
    "WANDB_INSECURE_DISABLE_SSL",
)
_LOOK_EVERY_SECONDS = 0.5
_NOTE_EVERY_SECONDS = 5.0
_MAX_AGAIN = 3  # how often it begins anew where W&B's own process died
_FINISH_SECONDS = 300.0  # for uploading what is left: the training waits for less


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a run that is stopped is told to its end
    paths = RunPaths(arguments.run)
    arguments.people, arguments.environment = redirect_noise(paths), dict(os.environ)
    if arguments.parent:
        threading.Thread(target=let_go, args=(arguments.people, arguments.parent), daemon=True).start()
    before = load_trace(paths)
    try:
        return Uplink(paths, load_plan(paths.plan), arguments, before).run()
    except LauncherError as error:
        say(f"W&B: not told: {error}")
        return int(ExitCode.RUN_FAILED)
    except (ServerUnusableError, NotSharedError) as error:
        if arguments.node:
            return int(ExitCode.DONE)  # the first node says why, once
        arguments.alone = True
        begin_anew(arguments, again=0, offline_because=str(error))
    except Exception as error:  # wandb's, of any kind
        what = f"{type(error).__name__}: {(str(error).strip() or 'no word').splitlines()[0]}"
        tell_again(paths, before)
        if arguments.again < _MAX_AGAIN:
            begin_anew(arguments, again=arguments.again + 1)
        if not arguments.offline_because:
            begin_anew(arguments, again=0, offline_because=f"its own service fails: {what}")
        say(f"W&B: not told any more: {what}; {paths.logs / LOG}")
        return int(ExitCode.DONE)  # it was said


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launcher.training.uplink", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--parent", type=int, default=0, help="the training; 0: nobody, what is there is told")
    parser.add_argument("--node", type=int, default=0, help="which node this is; only the first tells metrics")
    parser.add_argument("--id", help="of the run, where another node has chosen it")
    parser.add_argument("--again", type=int, default=0, help="how often it has begun anew")
    parser.add_argument("--alone", action="store_true", help="other nodes do not write to this run")
    parser.add_argument("--offline-because", default="", help="why the server is not asked")
    return parser


class Uplink:
    def __init__(self, paths: RunPaths, plan: Plan, arguments: argparse.Namespace, before: WandbTrace | None) -> None:
        self._paths, self._plan, self._arguments, self._before = paths, plan, arguments, before
        self._noted = time.monotonic()
        self._told: tuple[object, ...] = ()  # facts that the config has

    def run(self) -> int:
        tracking = decide_tracking(self._plan.wandb.mode, os.environ)
        if tracking.mode == "disabled":
            return 0
        before = self._before
        run_id = self._arguments.id or (before.id if before else make_id(self._paths.run_id))
        if self._arguments.offline_because:
            tracking = Tracking(mode="offline", reason=self._arguments.offline_because)
        place = find_place(self._plan.wandb, os.environ)
        clean_environment(is_online=tracking.mode == "online")
        opening = Opening(
            run_id=run_id,
            place=place,
            tracking=tracking,
            node=self._arguments.node,
            is_shared=self._plan.hardware.nodes > 1 and not self._arguments.alone,
        )
        opened = open_run(self._plan, self._paths, opening)
        if self._arguments.node:
            self._wait_for_end()
        else:
            if not self._arguments.again:
                say(opened.announce(before))
            self._trace = remember(self._paths, before, opened)
            self._follow(opened.run)
        self._finish(opened)
        return 0

    def _follow(self, run: Any) -> None:
        """To the end of the run, or of the training."""
        follower = Follower(self._paths.metrics, told_seconds=self._trace.told_seconds)
        while True:
            outcome = load_outcome(self._paths.outcome)
            has_ended = self._has_ended(outcome)  # asked first: what was written before the end is read behind it
            for row in follower.read():
                tell(run, row)
            if outcome is not None:
                self._tell_facts(run, outcome)
            self._note(follower.told_seconds, at_once=has_ended)
            if has_ended:
                return
            time.sleep(_LOOK_EVERY_SECONDS)

    def _tell_facts(self, run: Any, outcome: Outcome) -> None:
        """Known once the data is open and the model was watched; and again where the training took a rung."""
        facts = (outcome.data_key, outcome.num_steps, len(outcome.rungs))
        if outcome.data_key is None or facts == self._told:
            return
        self._told = facts
        manifest = json.loads(self._paths.manifest.read_text(encoding="utf-8"))
        config = make_config(load_plan(self._paths.plan), manifest, data_key=outcome.data_key)
        seen = {"observed": outcome.observed, "versions": outcome.versions, "git_commit": outcome.git_commit}
        run.config.update({**config, **seen, "num_steps": outcome.num_steps}, allow_val_change=True)

    def _note(self, told_seconds: float, *, at_once: bool) -> None:
        if not at_once and time.monotonic() - self._noted < _NOTE_EVERY_SECONDS:
            return
        self._noted = time.monotonic()
        if told_seconds > self._trace.told_seconds:
            self._trace = self._trace.model_copy(update={"told_seconds": told_seconds})
            with suppress(LauncherError):  # a full disk: it is only told again
                write_trace(self._paths, self._trace)

    def _has_ended(self, outcome: Outcome | None) -> bool:
        if self._arguments.parent == 0 or os.getppid() != self._arguments.parent:
            return True
        return outcome is not None and outcome.is_final and outcome.pid == self._arguments.parent

    def _wait_for_end(self) -> None:
        """Another node's outcome may lie on a disk that is not here."""
        while os.getppid() == self._arguments.parent:
            time.sleep(_LOOK_EVERY_SECONDS)

    def _finish(self, opened: Opened) -> None:
        """A training that is gone without a word has crashed, whatever it had written last."""
        outcome, run = load_outcome(self._paths.outcome), opened.run
        if outcome is not None and not outcome.is_final:
            outcome = outcome.model_copy(update={"status": "crashed", "exit_code": int(ExitCode.RUN_FAILED)})
        limit = threading.Timer(_FINISH_SECONDS, lambda: os._exit(int(ExitCode.RUN_FAILED)))
        limit.daemon = True
        limit.start()
        if outcome is not None and not self._arguments.node:
            summarise(run, self._paths, outcome)
            if outcome.status == "stopped":
                run.mark_preempting()
            if outcome.status == "done":
                log_artifacts(run, self._plan, self._paths)
        run.finish(exit_code=1 if outcome is None or outcome.exit_code is None else outcome.exit_code)


def clean_environment(*, is_online: bool) -> None:
    """Names, ids, projects, sweeps and settings of other runs are none of this one's; the way to the server is."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        if not (is_online and name in _KEPT_VARIABLES):
            del os.environ[name]
    os.environ["WANDB_SILENT"] = "true"  # what is to be said is said here


def tell(run: Any, row: StepMetrics) -> None:
    run.log({**row.values, STEP_AXIS: row.step, EPOCH_AXIS: row.epoch})


def remember(paths: RunPaths, before: WandbTrace | None, opened: Opened) -> WandbTrace:
    """Told again from the beginning where another run begins."""
    known = before if before is not None and before.id == opened.run_id else None
    folders = () if known is None else known.folders
    trace = WandbTrace(
        id=opened.run_id,
        project=opened.project,
        mode=opened.mode,
        url=opened.url,
        folders=(*folders, opened.folder) if opened.mode == "offline" else folders,
        told_seconds=0.0 if known is None else known.told_seconds,
    )
    with suppress(LauncherError):
        write_trace(paths, trace)
    return trace


def tell_again(paths: RunPaths, before: WandbTrace | None) -> None:
    """What this process has told may be lost with the service that died."""
    now = load_trace(paths)
    if now is not None:
        told_seconds = 0.0 if before is None else before.told_seconds
        with suppress(LauncherError):
            write_trace(paths, now.model_copy(update={"told_seconds": told_seconds}))


def begin_anew(arguments: argparse.Namespace, *, again: int, offline_because: str = "") -> NoReturn:
    """In the place of this process, so that it stays the training's child: rows that were not told are told then."""
    why = offline_because or arguments.offline_because
    words = ["--parent", str(arguments.parent), "--node", str(arguments.node), "--again", str(again)]
    words += ["--id", arguments.id] if arguments.id else []
    words += ["--offline-because", why] if why else []
    words += ["--alone"] if arguments.alone else []
    sys.stderr.flush()
    os.dup2(arguments.people, 2)
    command = [sys.executable, "-m", "launcher.training.uplink", str(arguments.run), *words]
    os.execve(sys.executable, command, arguments.environment)


def redirect_noise(paths: RunPaths) -> int:
    """What wandb and its service write of themselves, panics too, goes to a log; what we say goes to people, by the
    descriptor that is returned."""
    sys.stderr.flush()
    people = os.dup(2)
    with suppress(OSError), (paths.logs / LOG).open("ab") as log:
        os.dup2(log.fileno(), 2)
    sys.stderr = os.fdopen(people, "w", buffering=1)
    hide_secrets()
    return people


def let_go(people: int, parent: int) -> None:
    """Whoever reads what a training writes waits until nobody can write any more: not for an upload behind its end."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), people)


if __name__ == "__main__":
    status = main()
    os._exit(status)  # wandb's own words at the end of a process are of no use to anybody
