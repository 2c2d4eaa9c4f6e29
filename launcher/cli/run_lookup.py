"""Lookup of run directories by id or path."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from launcher.core.errors import InputError, ManifestError, Problem
from launcher.core.log import get_logger
from launcher.core.run_paths import FIND_ELSEWHERE, RunPaths, expand_home, open_run

log = get_logger(__name__)

_SHOWN_RUNS = 5


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN and --runs-dir, for find_run_or_newest."""
    parser.add_argument(
        "run",
        type=expand_home,
        metavar="RUN",
        help="a run by its id, or the path of its directory; an expert's name means its newest finished run",
    )
    add_runs_dir(parser)


def add_runs_dir(parser: argparse._ActionsContainer) -> None:
    """Add --runs-dir."""
    parser.add_argument(
        "--runs-dir", type=expand_home, metavar="DIR", default="runs", help="folder of run directories (default: runs)"
    )


def resolve_expert_name(expert: str) -> str:
    """Return the expert name that run directories record, given an expert's name, folder or manifest."""
    from launcher.manifest.load import load_manifest
    from launcher.manifest.locate import find_manifest

    try:
        return load_manifest(find_manifest(expert)).manifest.expert
    except ManifestError:
        return expert


def find_finished_run(expert: str, runs_dir: Path, hint: str = FIND_ELSEWHERE) -> RunPaths:
    """Return the newest finished run of an expert, given its name, folder or manifest."""
    from launcher.manifest.locate import find_manifest
    from launcher.runs.record import load_outcome

    name = resolve_expert_name(expert)
    for paths in list_runs(runs_dir):
        outcome = load_outcome(paths.outcome)
        if outcome is not None and outcome.status == "done" and load_expert_name(paths) == name:
            return paths
    find_manifest(expert)  # a wrong name is the more helpful error
    raise InputError(f"no finished run of {name} in {runs_dir.absolute()}", hint=hint)


def load_expert_name(paths: RunPaths) -> str | None:
    """Return the name of the expert that a run trains; None if the run's plan cannot be read."""
    from launcher.plan import load_plan

    try:
        return load_plan(paths.plan).expert
    except InputError:
        return None


def is_expert(name: str) -> bool:
    """Return whether a text refers to an existing expert: by its name, its folder or its manifest."""
    from launcher.manifest.locate import find_manifest

    try:
        return find_manifest(name).is_file()
    except ManifestError:
        return False


def find_run_or_newest(name: str, runs_dir: Path) -> RunPaths:
    """Return the run that an id or a path names; for an expert's name, its newest finished run, which is logged."""
    if not name.strip() or is_run(runs_dir / name) or is_run(Path(name)) or not is_expert(name):
        return find_run(name, runs_dir)
    if any(_is_damaged_run(folder) for folder in (runs_dir / name, Path(name))):  # its manifest.json is not an expert
        return find_run(name, runs_dir)
    paths = find_finished_run(name, runs_dir)
    log.info(f"using {paths.root}, the newest finished run of {name}")
    return paths


def find_run(name: str, runs_dir: Path) -> RunPaths:
    """Return the run with this id or path; if there is none, raise InputError with a list of the newest runs."""
    from launcher.manifest.parse_json import shorten

    candidates = (runs_dir / name, Path(name)) if name.strip() else ()
    for folder in candidates:
        if is_run(folder):
            return open_run(folder)
    exists = any(_is_dir(folder) for folder in candidates)
    shown = repr(shorten(name))
    title = f"{shown} is not a run directory: it has no plan.json" if exists else f"no run called {shown}"
    for folder in filter(_is_dir, candidates):
        _suggest_neighbor(shown, folder)
    runs, folder = list_runs(runs_dir), runs_dir.absolute()
    if is_expert(name) and not any(map(_is_damaged_run, candidates)):
        expert = resolve_expert_name(name)
        title = f"{shown} is an expert: name one of its runs"
        runs = [paths for paths in runs if load_expert_name(paths) == expert] or runs
    if not runs:
        raise InputError(title, hint=f"{folder} has no runs; `launcher train EXPERT` creates one; {FIND_ELSEWHERE}")
    newest = tuple(Problem(where=paths.run_id, what=_describe(paths)) for paths in runs[:_SHOWN_RUNS])
    more = f" of {len(runs)}" if len(runs) > _SHOWN_RUNS else ""
    raise InputError(title, newest, hint=f"above: the newest runs{more} in {folder}; {FIND_ELSEWHERE}")


def _suggest_neighbor(shown: str, folder: Path) -> None:
    """Raise an error that names the run if a folder is in a run directory, or its runs if it contains some."""
    parent = next((parent for parent in folder.parents if is_run(parent)), None)
    if parent is not None:
        raise InputError(f"{shown} is a folder in a run directory", hint=f"name the run: {shlex.quote(str(parent))}")
    if runs := list_runs(folder):
        newest = tuple(Problem(where=str(paths.root), what=_describe(paths)) for paths in runs[:_SHOWN_RUNS])
        hint = f"name one of its runs, or add --runs-dir {shlex.quote(str(folder))} and a run's name"
        raise InputError(f"{shown} is a folder with run directories", newest, hint=hint)


def list_runs(runs_dir: Path) -> list[RunPaths]:
    """List the runs of a folder, newest first."""
    try:
        folders = [folder for folder in runs_dir.iterdir() if is_run(folder)]
    except OSError:
        return []
    folders.sort(key=lambda folder: (folder / "plan.json").stat().st_mtime, reverse=True)
    return [RunPaths(folder) for folder in folders]


def _describe(paths: RunPaths) -> str:
    from launcher.runs.record import load_outcome

    outcome = load_outcome(paths.outcome)
    return "not started" if outcome is None else outcome.status


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory."""
    try:
        return RunPaths(folder).plan.is_file()
    except OSError:  # the name is too long
        return False


def _is_damaged_run(folder: Path) -> bool:
    """Return whether a folder has the request of a run, but no plan.json that can be read."""
    return _is_dir(folder) and os.path.lexists(RunPaths(folder).request) and not is_run(folder)


def _is_dir(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:
        return False
