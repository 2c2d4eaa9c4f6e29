"""RUN of the command line -> a run directory: by its id under the runs' folder, or by its path."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.errors import InputError, ManifestError, Problem
from launcher.paths import RunPaths

_SHOWN_RUNS = 5


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run by its id, or the path of its directory")
    add_runs_dir(parser)


def add_runs_dir(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--runs-dir", metavar="DIR", default="runs", help="where run directories lie (default: runs)")


def name_expert(given: str) -> str:
    """As its runs call it, whether it is given by name, folder or file; by its name where it is no longer here."""
    from launcher.manifest.load import load_manifest
    from launcher.manifest.locate import find_manifest

    try:
        return load_manifest(find_manifest(given)).manifest.expert
    except ManifestError:
        return given


def find_run(name: str, runs_dir: Path) -> RunPaths:
    from launcher.manifest.reading import shorten

    candidates = (runs_dir / name, Path(name)) if name.strip() else ()
    for folder in candidates:
        if _is_run(folder):
            return RunPaths(folder)
    is_there = any(_is_dir(folder) for folder in candidates)
    shown = repr(shorten(name))
    title = f"{shown} is not a run directory: it has no plan.json" if is_there else f"no run called {shown}"
    runs = list_runs(runs_dir)
    if not runs:
        raise InputError(
            title, hint=f"{runs_dir} has no runs; `launcher train EXPERT` makes one, --runs-dir looks elsewhere"
        )
    newest = tuple(Problem(where=paths.run_id, what=_describe(paths)) for paths in runs[:_SHOWN_RUNS])
    more = f" of {len(runs)}" if len(runs) > _SHOWN_RUNS else ""
    raise InputError(title, newest, hint=f"above: the newest runs{more} in {runs_dir}; --runs-dir looks elsewhere")


def list_runs(runs_dir: Path) -> list[RunPaths]:
    """Newest first."""
    try:
        folders = [folder for folder in runs_dir.iterdir() if _is_run(folder)]
    except OSError:
        return []
    folders.sort(key=lambda folder: (folder / "plan.json").stat().st_mtime, reverse=True)
    return [RunPaths(folder) for folder in folders]


def _describe(paths: RunPaths) -> str:
    from launcher.record import load_outcome

    outcome = load_outcome(paths.outcome)
    return "not started" if outcome is None else outcome.status


def _is_run(folder: Path) -> bool:
    try:
        return RunPaths(folder).plan.is_file()
    except OSError:  # nothing has a name that is too long
        return False


def _is_dir(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:
        return False
