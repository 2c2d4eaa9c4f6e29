"""Lookup of run directories by id or path."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.core.errors import InputError, ManifestError, Problem
from launcher.core.run_paths import FIND_ELSEWHERE, RunPaths

_SHOWN_RUNS = 5


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN and --runs-dir."""
    parser.add_argument("run", metavar="RUN", help="a run by its id, or the path of its directory")
    add_runs_dir(parser)


def add_runs_dir(parser: argparse._ActionsContainer) -> None:
    """Add --runs-dir."""
    parser.add_argument("--runs-dir", metavar="DIR", default="runs", help="folder of run directories (default: runs)")


def resolve_expert_name(expert: str) -> str:
    """Return the name that an expert's runs record, given its name, folder or manifest."""
    from launcher.manifest.load import load_manifest
    from launcher.manifest.locate import find_manifest

    try:
        return load_manifest(find_manifest(expert)).manifest.expert
    except ManifestError:
        return expert


def find_run(name: str, runs_dir: Path) -> RunPaths:
    """Return the run with this id or path; the error lists the newest runs."""
    from launcher.manifest.parse_json import shorten

    candidates = (runs_dir / name, Path(name)) if name.strip() else ()
    for folder in candidates:
        if _is_run(folder):
            return RunPaths(folder)
    exists = any(_is_dir(folder) for folder in candidates)
    shown = repr(shorten(name))
    title = f"{shown} is not a run directory: it has no plan.json" if exists else f"no run called {shown}"
    runs, folder = list_runs(runs_dir), runs_dir.absolute()
    if not runs:
        raise InputError(title, hint=f"{folder} has no runs; `launcher train EXPERT` creates one; {FIND_ELSEWHERE}")
    newest = tuple(Problem(where=paths.run_id, what=_describe(paths)) for paths in runs[:_SHOWN_RUNS])
    more = f" of {len(runs)}" if len(runs) > _SHOWN_RUNS else ""
    raise InputError(title, newest, hint=f"above: the newest runs{more} in {folder}; {FIND_ELSEWHERE}")


def list_runs(runs_dir: Path) -> list[RunPaths]:
    """List the runs of a folder, newest first."""
    try:
        folders = [folder for folder in runs_dir.iterdir() if _is_run(folder)]
    except OSError:
        return []
    folders.sort(key=lambda folder: (folder / "plan.json").stat().st_mtime, reverse=True)
    return [RunPaths(folder) for folder in folders]


def _describe(paths: RunPaths) -> str:
    from launcher.runs.record import load_outcome

    outcome = load_outcome(paths.outcome)
    return "not started" if outcome is None else outcome.status


def _is_run(folder: Path) -> bool:
    try:
        return RunPaths(folder).plan.is_file()
    except OSError:  # the name is too long
        return False


def _is_dir(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:
        return False
