"""Write outcome.json, the record of a run: its attempts, what was active, and how it ended."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from launcher import __version__
from launcher.analysis.report import write_report
from launcher.core.errors import LauncherError
from launcher.core.log import get_logger
from launcher.core.run_paths import RunPaths, write_text_atomically
from launcher.core.versions import find_package_versions
from launcher.plan.model import Plan
from launcher.runs.record import Attempt, Outcome, load_outcome, write_outcome
from launcher.runs.wandb_settings import load_trace

log = get_logger(__name__)

# Fields of the attempt before that hold until this one has trained something else.
_KEPT = (
    *("oom_fallbacks", "steps_done", "num_steps", "final_loss", "best_step", "best_metric"),
    *("data_key", "train_sequences", "shared_system"),
)


class Tracker(Protocol):
    """The interface of a tracker, such as W&B, whose upload is completed when the run ends."""

    def finish(self) -> None:
        """Upload the remaining data."""


class RunRecorder:
    """Writer of outcome.json; only rank 0 writes."""

    def __init__(self, paths: RunPaths, *, is_main: bool) -> None:
        self._path, self._plan_path, self._is_main = paths.outcome, paths.plan, is_main
        before = load_outcome(paths.outcome)
        self.was_done = before is not None and before.status == "done"
        started_at = _now()
        self._outcome = Outcome(
            run_id=paths.run_id,
            status="running",
            started_at=started_at if before is None else before.started_at,
            pid=os.getpid(),
            versions=collect_versions(),
            git_commit=get_git_commit(),
            **({} if before is None else {name: getattr(before, name) for name in _KEPT}),
            attempts=(*(() if before is None else before.attempts), Attempt(started_at=started_at)),
        )
        self._paths = paths
        self._trackers: Sequence[Tracker] = ()
        self._has_ended = False
        if not self.was_done:
            self._write()

    def attach_trackers(self, trackers: Sequence[Tracker]) -> None:
        """Register trackers whose uploads are waited for when the run ends."""
        self._trackers = trackers

    def add_spent_seconds(self, seconds: float) -> float:
        """Record and return the time of earlier attempts: the larger of `seconds` and what was recorded before."""
        spent = max(seconds, *(attempt.spent_seconds for attempt in self._outcome.attempts))
        self._update_attempt(spent_seconds=spent)
        self._write()
        return spent

    def start_attempt(self, from_step: int, loss: float | None) -> float | None:
        """Record how many steps were completed before this attempt; return the loss of the last of them.

        `loss` is None if the metrics of that step are lost; the record may still have it.
        """
        if loss is None and from_step == self._outcome.steps_done:
            loss = self._outcome.final_loss
        self._update_attempt(from_step=from_step)
        self.update(steps_done=from_step, final_loss=loss)
        return loss

    def update(self, **fields: object) -> None:
        """Update fields of the outcome; `observed` is merged with what it contains already."""
        if isinstance(observed := fields.get("observed"), dict):
            fields["observed"] = {**self._outcome.observed, **observed}
        self._outcome = self._outcome.model_copy(update=fields)
        self._write()

    def record_fallback(self, plan: Plan) -> None:
        """Record an out-of-memory fallback, and write the plan that the run continues with."""
        self.update(oom_fallbacks=(*self._outcome.oom_fallbacks, plan.decisions[-1].value))
        if self._is_main:
            write_text_atomically(self._plan_path, plan.model_dump_json(indent=2) + "\n", redacts=False)

    def finish(self, *, waits: bool = True, **fields: object) -> None:
        """Record the end of the run. Later calls are ignored. Never raises: the disk may be full.

        `waits`: whether to wait for the trackers to upload the remaining data.
        """
        if self._has_ended:
            return
        self._has_ended = True
        ended_at = _now()
        self._update_attempt(ended_at=ended_at, steps_done=fields.get("steps_done", self._outcome.steps_done))
        self._record_end(ended_at=ended_at, **fields)
        if self._trackers and waits:
            for tracker in self._trackers:
                tracker.finish()
            self._record_end()  # the W&B run of a short run has its id only now

    def _record_end(self, **fields: object) -> None:
        trace = load_trace(self._paths)
        if not fields and trace == self._outcome.wandb:
            return
        try:
            self.update(wandb=trace, **fields)
        except LauncherError as error:
            log.warning(error)
        if self._is_main:
            write_report(self._paths)

    def _update_attempt(self, **fields: object) -> None:
        *others, last = self._outcome.attempts
        self._outcome = self._outcome.model_copy(update={"attempts": (*others, last.model_copy(update=fields))})

    def _write(self) -> None:
        if self._is_main:
            write_outcome(self._path, self._outcome)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def collect_versions() -> dict[str, str]:
    """Return the versions of this package, Python and the installed libraries."""
    return {"launcher": __version__, "python": platform.python_version(), **find_package_versions()}


def get_git_commit() -> str | None:
    """Return the commit of the checkout that contains this package, marked if files are modified; None outside git."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
