"""Facts of a report, loaded from the run directory."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.core.errors import InputError
from launcher.core.run_files import read_text
from launcher.core.run_paths import RunPaths
from launcher.request.request import Request, load_request
from launcher.runs.checkpoints import list_checkpoints, step_of
from launcher.runs.evaluations import RunEvaluations, load_evaluations
from launcher.runs.record import RunRecord, list_run_code, load_record

_FILES = (
    ("manifest", "resolved manifest"),
    ("request", "the request"),
    ("hardware", "hardware of the plan"),
    ("plan", "all decisions of the plan"),
    ("accelerate", "accelerate config"),
    ("deepspeed", "DeepSpeed config"),
    ("command", "launch command"),
    ("slurm", "Slurm script"),
    ("metrics", "one line per step and evaluation"),
    ("evaluations", "graded answers to held-out rows during training"),
    ("evaluation", "graded answers of `launcher eval`"),
    ("outcome", "status and results of the run"),
    ("wandb", "the W&B run"),
    ("checkpoints", "resume points"),
    ("adapter", "trained adapter and its model card"),
    ("merged", "base model with the adapter merged"),
    ("logs", "console output"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """A file of the run directory."""

    name: str
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    """Everything that a report shows."""

    record: RunRecord
    evaluations: RunEvaluations
    request: Request | None  # None: missing, or written by another version
    command: str | None  # None: `accelerate launch` was called directly
    files: tuple[RunFile, ...]  # existing ones only
    saved_step: int | None  # step of the newest checkpoint
    code: tuple[str, ...] = ()  # that the run directory names


def load_facts(paths: RunPaths) -> ReportFacts:
    """Load the facts of a report from a run directory."""
    checkpoints, record = list_checkpoints(paths), load_record(paths)
    return ReportFacts(
        record=record,
        evaluations=load_evaluations(record),
        request=_load_request(paths),
        command=_load_command(paths),
        files=tuple(_list_files(paths)),
        saved_step=step_of(checkpoints[0]) if checkpoints else None,
        code=list_run_code(record),
    )


def _load_request(paths: RunPaths) -> Request | None:
    try:
        return load_request(paths.request)
    except InputError:
        return None


def _load_command(paths: RunPaths) -> str | None:
    try:
        return read_text(paths.command)
    except InputError:
        return None


def _list_files(paths: RunPaths) -> list[RunFile]:
    files = [(getattr(paths, attribute), description) for attribute, description in _FILES]
    return [
        RunFile(name=path.name + "/" * path.is_dir(), description=description)
        for path, description in files
        if path.exists()
    ]
