"""Gathers what a report tells: all of it lies in the run directory."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.checkpoints import list_checkpoints, step_of
from launcher.errors import LauncherError
from launcher.evaluations import RunEvaluations, load_evaluations
from launcher.inputs import Request, load_request
from launcher.paths import RunPaths
from launcher.record import RunRecord, load_record

_FILES = (
    ("manifest", "the manifest, resolved"),
    ("request", "what was asked for"),
    ("hardware", "what it was planned for"),
    ("plan", "every decision, as a value"),
    ("accelerate", "accelerate's configuration"),
    ("deepspeed", "DeepSpeed's configuration"),
    ("command", "what was started"),
    ("slurm", "the script for Slurm"),
    ("metrics", "a line for each step and evaluation"),
    ("evaluations", "answers to held-out rows while it trained, each with its verdict"),
    ("evaluation", "what `launcher eval` found, answer by answer"),
    ("outcome", "what became of the run"),
    ("wandb", "where it lies in W&B"),
    ("checkpoints", "to go on from"),
    ("adapter", "what was trained, with its model card"),
    ("merged", "adapter and base as one model"),
    ("logs", "all that was written to the console"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    name: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    record: RunRecord
    evaluations: RunEvaluations
    request: Request | None  # None: not kept, or by another version
    command: str | None  # None: `accelerate launch` was called by hand
    files: tuple[RunFile, ...]  # those that are there
    saved_step: int | None  # of the newest checkpoint


def load_facts(paths: RunPaths) -> ReportFacts:
    checkpoints, record = list_checkpoints(paths), load_record(paths)
    return ReportFacts(
        record=record,
        evaluations=load_evaluations(record),
        request=_load_request(paths),
        command=_load_command(paths),
        files=tuple(_find_files(paths)),
        saved_step=step_of(checkpoints[0]) if checkpoints else None,
    )


def _load_request(paths: RunPaths) -> Request | None:
    try:
        return load_request(paths.request)
    except LauncherError:
        return None


def _load_command(paths: RunPaths) -> str | None:
    try:
        return paths.command.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _find_files(paths: RunPaths) -> list[RunFile]:
    places = [(getattr(paths, attribute), what) for attribute, what in _FILES]
    return [RunFile(name=place.name + "/" * place.is_dir(), what=what) for place, what in places if place.exists()]
