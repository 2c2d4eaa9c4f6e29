"""What became of a run: outcome.json, written by the training, and by its launcher where the training could not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from launcher.errors import ExitCode, LauncherError
from launcher.metrics import EVAL_LOSS, TRAIN_LOSS, StepMetrics, load_metrics
from launcher.paths import RunPaths, write_text_atomically
from launcher.plan import Plan, load_plan
from launcher.redaction import find_known_secrets, redact_text
from launcher.values import Frozen

# running: it still runs, or it died so suddenly that it could not say more.
Status = Literal["running", "done", "failed", "stopped", "crashed"]


class Attempt(Frozen):
    """One start of a run: a run that was stopped, or died, has several."""

    started_at: str
    from_step: int = 0  # so many were done before
    ended_at: str | None = None  # None: it runs, or was killed without a word
    steps_done: int | None = None
    spent_seconds: float = 0.0  # that the run is known to have taken before; rows that told of it may be cut away


class WandbTrace(Frozen):
    """Where a run lies in Weights & Biases: taken up again, it is written on under the same id. On disk: wandb.json."""

    schema_version: Literal[1] = 1
    id: str
    project: str
    mode: Literal["online", "offline"]
    url: str | None = None
    folders: tuple[str, ...] = ()  # in the run's directory, of what was written offline, one for each attempt
    told_seconds: float = 0.0  # rows up to this wall-clock time of the run were told


class Outcome(Frozen):
    schema_version: Literal[1] = 1
    run_id: str
    status: Status
    exit_code: int | None = None  # None while it runs
    error: str = ""  # as it was shown
    started_at: str  # ISO 8601, UTC
    ended_at: str | None = None
    pid: int
    steps_done: int = 0
    num_steps: int | None = None
    final_loss: float | None = None
    ended_because: str = ""  # before its last step, by its own rules
    best_step: int | None = None
    best_metric: float | None = None
    data_key: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    git_commit: str | None = None
    attempts: tuple[Attempt, ...] = ()
    rungs: tuple[str, ...] = ()  # taken down the ladder, because memory ran out
    observed: dict[str, str] = Field(default_factory=dict)  # what is active in the live process
    wandb: WandbTrace | None = None
    goodput: dict[str, float] = Field(default_factory=dict)  # at the end, by the metrics' names

    @property
    def is_final(self) -> bool:
        return self.status != "running"


def write_outcome(path: Path, outcome: Outcome) -> None:
    told = redact_text(outcome.error, find_known_secrets(os.environ))
    write_text_atomically(path, outcome.model_copy(update={"error": told}).model_dump_json(indent=2) + "\n")


def load_outcome(path: Path) -> Outcome | None:
    """None where there is none, or none that can be read."""
    try:
        return Outcome.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """All that a run directory tells of a run, finished or not."""

    paths: RunPaths
    plan: Plan
    outcome: Outcome | None  # None: it was never started
    rows: tuple[StepMetrics, ...]  # steps and evaluations, in order

    @property
    def steps(self) -> tuple[StepMetrics, ...]:
        return tuple(row for row in self.rows if TRAIN_LOSS in row.values)

    @property
    def evaluations(self) -> tuple[StepMetrics, ...]:
        return tuple(row for row in self.rows if EVAL_LOSS in row.values)


def load_record(paths: RunPaths) -> RunRecord:
    return RunRecord(
        paths=paths,
        plan=load_plan(paths.plan),
        outcome=load_outcome(paths.outcome),
        rows=tuple(load_metrics(paths.metrics)) if paths.metrics.is_file() else (),
    )


def exit_code_of(error: BaseException) -> int:
    return int(error.exit_code) if isinstance(error, LauncherError) else int(ExitCode.BUG)
