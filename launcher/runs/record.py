"""outcome.json: status and results of a run, written by the training, or by its launcher if the training could not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field, model_validator

from launcher.core.errors import ExitCode, LauncherError
from launcher.core.frozen_model import Frozen
from launcher.core.metrics import EVAL_LOSS, TRAIN_LOSS, StepMetrics, find_values, load_metrics
from launcher.core.run_files import load_model, load_model_or_none
from launcher.core.run_paths import RunPaths, write_text_atomically
from launcher.manifest import load_manifest
from launcher.manifest.trust import list_judge_code, list_remote_code
from launcher.plan import Plan, load_plan

_OLD_FALLBACKS = "rungs"  # the key of oom_fallbacks in version 0.1
# running: it still runs, or was killed without writing an outcome.
Status = Literal["running", "done", "failed", "stopped", "crashed"]


class Attempt(Frozen):
    """One start of a run; a run that was stopped or crashed has several."""

    started_at: str
    from_step: int = 0  # steps completed before
    ended_at: str | None = None  # None: it runs, or was killed
    steps_done: int | None = None
    spent_seconds: float = 0.0  # of earlier attempts, whose metrics may have been truncated


class MlflowTrace(Frozen):
    """Content of mlflow.json: the MLflow run that a run directory is logged to."""

    run_id: str
    experiment_id: str
    logged_seconds: float = 0.0  # rows up to this time of the run are logged


class WandbTrace(Frozen):
    """The W&B run that a run logs to, so that a resumed run continues under the same id. On disk: wandb.json."""

    schema_version: Literal[1] = 1
    id: str
    project: str
    mode: Literal["online", "offline"]
    url: str | None = None
    folders: tuple[str, ...] = ()  # offline runs in the run directory, one per attempt
    told_seconds: float = 0.0  # rows up to this wall-clock time of the run are logged


class Outcome(Frozen):
    """Status, results and environment of a run."""

    schema_version: Literal[1] = 1
    run_id: str
    status: Status
    exit_code: int | None = None  # None while it runs
    error: str = ""  # as printed
    started_at: str  # ISO 8601, UTC
    ended_at: str | None = None
    pid: int
    steps_done: int = 0
    num_steps: int | None = None
    final_loss: float | None = None
    ended_because: str = ""  # reason for ending before the last step, such as early stopping
    best_step: int | None = None
    best_metric: float | None = None
    data_key: str | None = None
    train_sequences: int | None = None  # of an epoch
    shared_system: str = ""  # system message of all training rows
    versions: dict[str, str] = Field(default_factory=dict)
    git_commit: str | None = None
    attempts: tuple[Attempt, ...] = ()
    oom_fallbacks: tuple[str, ...] = ()  # applied after running out of memory
    observed: dict[str, str] = Field(default_factory=dict)  # what is active in the process, for people to read
    # The same for code. The defaults are for records written before these fields existed.
    attention_backend: str | None = None  # of the running model
    has_compile_failed: bool = False
    has_cuda_graph_failed: bool = False
    compiled_graphs: int | None = None  # before the first step; None: not counted
    recompiled_graphs: int = 0  # while training
    slow_links: str = ""  # how much slower communication is than planned; empty: as planned
    wandb: WandbTrace | None = None
    goodput: dict[str, float] = Field(default_factory=dict)  # at the end, by metric name

    @model_validator(mode="before")
    @classmethod
    def _accept_old_key(cls, data: Any) -> Any:
        """Read outcome.json of version 0.1, which had another key for the OOM fallbacks."""
        if isinstance(data, dict) and _OLD_FALLBACKS in data:
            data = {**data, "oom_fallbacks": data[_OLD_FALLBACKS]}
            del data[_OLD_FALLBACKS]
        return data

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self.status != "running"


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write outcome.json atomically."""
    write_text_atomically(path, outcome.model_dump_json(indent=2) + "\n")


def load_outcome(path: Path) -> Outcome | None:
    """Return the outcome, None if it is missing or unreadable."""
    return load_model_or_none(Outcome, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Plan, outcome and metrics of a run directory, finished or not."""

    paths: RunPaths
    plan: Plan
    outcome: Outcome | None  # None: never started
    rows: tuple[StepMetrics, ...]  # steps and evaluations, in order

    @property
    def steps(self) -> tuple[StepMetrics, ...]:
        """The logged metrics of training steps."""
        return tuple(row for row in self.rows if TRAIN_LOSS in row.values)

    @property
    def evaluations(self) -> tuple[StepMetrics, ...]:
        """The logged metrics that have a validation loss."""
        return tuple(row for row in self.rows if EVAL_LOSS in row.values)


def load_record(paths: RunPaths) -> RunRecord:
    """Load the plan, the outcome and the metrics of a run directory; raises InputError if one of them is damaged."""
    return RunRecord(
        paths=paths,
        plan=load_plan(paths.plan),
        outcome=load_model(Outcome, paths.outcome) if paths.outcome.exists() else None,
        rows=tuple(load_metrics(paths.metrics)) if paths.metrics.exists() else (),
    )


def seconds_between(begin: str, end: str) -> float | None:
    """Return the seconds from one recorded time to another; None if one cannot be read."""
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except (ValueError, TypeError):
        return None


def compute_median(rows: Iterable[StepMetrics], name: str) -> float | None:
    """Return the median of a metric's finite values; None if there are none."""
    values = find_values(rows, name)
    return median(values) if values else None


def get_global_batch(plan: Plan, outcome: Outcome | None) -> int:
    """Return the number of sequences per step: the planned global batch, but at most those of an epoch."""
    sequences = None if outcome is None else outcome.train_sequences
    planned = plan.batch.global_batch_size
    return planned if sequences is None else min(planned, sequences)


def list_run_code(record: RunRecord) -> tuple[str, ...]:
    """List the expert's judge code and the base's remote code, which commands run for this run directory if trusted."""
    remote = list_remote_code(record.plan.trust_remote_code, record.plan.base.name)
    try:
        return (*list_judge_code(load_manifest(record.paths.manifest).manifest), *remote)
    except LauncherError:
        return remote


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error."""
    return int(error.exit_code) if isinstance(error, LauncherError) else int(ExitCode.BUG)
