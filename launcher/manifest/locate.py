"""`neo4j` -> the file experts/neo4j/manifest.json: of the working directory, of the package, or any path."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import ManifestError
from launcher.manifest.spelling import closest

_PACKAGE = Path(__file__).resolve().parent.parent


def expert_folders() -> tuple[Path, ...]:
    """Where experts live: here, inside an installed wheel, beside the package in a checkout."""
    candidates = (Path("experts"), _PACKAGE / "experts", _PACKAGE.parent / "experts")
    return tuple(folder for folder in candidates if folder.is_dir())


def known_experts() -> tuple[str, ...]:
    names = {file.parent.name for folder in expert_folders() for file in folder.glob("*/manifest.json")}
    return tuple(sorted(names))


def find_manifest(name: str) -> Path:
    """An expert by name, or a manifest by path."""
    if name.endswith(".json") or "/" in name or "\\" in name or Path(name).is_dir():
        path = Path(name)
        return path / "manifest.json" if (path / "manifest.json").is_file() else path
    for folder in expert_folders():
        path = folder / name / "manifest.json"
        if path.is_file():
            return path
    known = known_experts()
    meant = closest(name, known)
    raise ManifestError(
        f"no expert called {name!r}" + (f"; did you mean {meant}?" if meant else ""),
        hint=f"known experts: {', '.join(known) or 'none here'}; or give the path of a manifest.json",
    )
