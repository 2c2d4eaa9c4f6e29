"""Lookup of manifests by the expert's name: in the working directory, the package and the checkout."""

from __future__ import annotations

import errno
from pathlib import Path

from launcher.core.errors import ManifestError
from launcher.manifest.parse_json import shorten
from launcher.manifest.suggest import find_closest

_PACKAGE = Path(__file__).resolve().parent.parent


def list_expert_folders() -> tuple[Path, ...]:
    """Return the folders of experts that exist: working directory, installed wheel, checkout."""
    candidates = (Path("experts"), _PACKAGE / "experts", _PACKAGE.parent / "experts")
    return tuple(folder for folder in candidates if _exists(folder, is_folder=True))


def list_experts() -> tuple[str, ...]:
    """Return the names of all known experts: those of the working directory, then those of the experts folders."""
    local, *others = (_list_names(folder) for folder in (Path(), *list_expert_folders()))
    return tuple(dict.fromkeys((*sorted(local), *sorted(set().union(*others)))))


def find_manifest(name: str) -> Path:
    """Return the manifest of an expert, given its name or a path; raises ManifestError."""
    if not name.strip():
        raise ManifestError("the name of the expert is empty", hint=_format_hint(list_experts()))
    path = Path(name)
    is_folder = _exists(path, is_folder=True)
    if is_folder and _exists(path / "manifest.json"):
        return path / "manifest.json"
    if name.endswith(".json") or "/" in name or "\\" in name:
        return path
    for folder in list_expert_folders():
        file = folder / name / "manifest.json"
        if _exists(file):
            return file
    if is_folder:
        return path
    if _exists(Path("runs", name, "plan.json")):
        raise ManifestError(
            f"{name} is a run, not an expert",
            hint=f"commands for runs: launcher report {name}, launcher ask {name}, launcher export {name}, "
            f"launcher eval --run {name}, launcher doctor --run {name}, launcher train --resume {name}",
        )
    known = list_experts()
    suggestion = find_closest(name, known)
    raise ManifestError(
        f"no expert called {shorten(name)!r}" + (f"; did you mean {suggestion}?" if suggestion else ""),
        hint=_format_hint(known),
    )


def _list_names(folder: Path) -> set[str]:
    """Return the experts of a folder; none if it cannot be read."""
    try:
        return {file.parent.name for file in folder.glob("*/manifest.json")}
    except OSError:
        return set()


def _format_hint(known: tuple[str, ...]) -> str:
    return (
        f"known experts: {', '.join(known) or 'none'}; your own are found in the folder where `launcher new` was run; "
        "or pass the path of a manifest.json"
    )


def _exists(path: Path, *, is_folder: bool = False) -> bool:
    """Check for a file or folder; raises ManifestError if it cannot be accessed, because it may be the right one."""
    try:
        return path.is_dir() if is_folder else path.is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
