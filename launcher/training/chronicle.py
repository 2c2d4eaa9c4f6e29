"""outcome.json, as the training itself tells it: when it begins, and how it ended."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import __version__
from launcher.errors import LauncherError, say
from launcher.paths import RunPaths, write_text_atomically
from launcher.plan.model import Plan
from launcher.record import Attempt, Outcome, load_outcome, write_outcome
from launcher.report import write_report
from launcher.tracking import load_trace
from launcher.versions import find_package_versions

if TYPE_CHECKING:
    from launcher.training.telling import Teller


class Chronicle:
    """Of one run; only the first rank writes."""

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
            versions=find_versions(),
            git_commit=find_commit(),
            rungs=() if before is None else before.rungs,
            attempts=(*(() if before is None else before.attempts), Attempt(started_at=started_at)),
        )
        self._paths = paths
        self._teller: Teller | None = None
        self._has_ended = False
        if not self.was_done:
            self._write()

    def accompany(self, teller: Teller | None) -> None:
        """Whoever tells others of this run hears of its end."""
        self._teller = teller

    def note_spent(self, seconds: float) -> float:
        """That earlier attempts have taken: by what they told, and by what was noted when some of that was cut away."""
        spent = max(seconds, *(attempt.spent_seconds for attempt in self._outcome.attempts))
        self._note_attempt(spent_seconds=spent)
        self._write()
        return spent

    def begin(self, from_step: int) -> None:
        """It is known now how many steps are done already."""
        self._note_attempt(from_step=from_step)
        self._write()

    def note(self, **facts: object) -> None:
        """What was observed is added to what was observed before."""
        if isinstance(seen := facts.get("observed"), dict):
            facts["observed"] = {**self._outcome.observed, **seen}
        self._outcome = self._outcome.model_copy(update=facts)
        self._write()

    def step_down(self, plan: Plan) -> None:
        """The plan that goes on is what this run has; what was given up is told."""
        self.note(rungs=(*self._outcome.rungs, plan.decisions[-1].value))
        if self._is_main:
            write_text_atomically(self._plan_path, plan.model_dump_json(indent=2) + "\n")

    def end(self, *, waits: bool = True, **facts: object) -> None:
        """Once: what ended a run is not undone by what comes behind it. A full disk may be what ended it: the exit code
        must tell of the run all the same. `waits`: for whoever tells others of it."""
        if self._has_ended:
            return
        self._has_ended = True
        ended_at = _now()
        self._note_attempt(ended_at=ended_at, steps_done=facts.get("steps_done", self._outcome.steps_done))
        self._note_end(ended_at=ended_at, **facts)
        if self._teller is not None and waits:
            self._teller.finish()
            self._note_end()  # a short run is told of only now

    def _note_end(self, **facts: object) -> None:
        trace = load_trace(self._paths)
        if not facts and trace == self._outcome.wandb:
            return
        try:
            self.note(wandb=trace, **facts)
        except LauncherError as error:
            say(f"warning: {error}")
        if self._is_main:
            write_report(self._paths)

    def _note_attempt(self, **facts: object) -> None:
        *others, last = self._outcome.attempts
        self._outcome = self._outcome.model_copy(update={"attempts": (*others, last.model_copy(update=facts))})

    def _write(self) -> None:
        if self._is_main:
            write_outcome(self._path, self._outcome)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def find_versions() -> dict[str, str]:
    return {"launcher": __version__, "python": platform.python_version(), **find_package_versions()}


def find_commit() -> str | None:
    """Of the checkout that this package lies in; with a mark where files are changed. None where it is none."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
