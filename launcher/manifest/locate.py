"""`neo4j` -> the file experts/neo4j/manifest.json: of the working directory, of the package, or any path."""

from __future__ import annotations

import errno
from pathlib import Path

from launcher.errors import ManifestError
from launcher.manifest.reading import shorten
from launcher.manifest.spelling import closest

_PACKAGE = Path(__file__).resolve().parent.parent


def expert_folders() -> tuple[Path, ...]:
    """Where experts live: here, inside an installed wheel, beside the package in a checkout."""
    candidates = (Path("experts"), _PACKAGE / "experts", _PACKAGE.parent / "experts")
    return tuple(folder for folder in candidates if _is_dir(folder))


def known_experts() -> tuple[str, ...]:
    names = {file.parent.name for folder in expert_folders() for file in folder.glob("*/manifest.json")}
    return tuple(sorted(names))


def find_manifest(name: str) -> Path:
    """An expert by name, or a manifest by path."""
    if not name.strip():
        raise ManifestError("an empty name is no expert", hint=_hint(known_experts()))
    given = Path(name)
    if _is_dir(given) and _is_file(given / "manifest.json"):
        return given / "manifest.json"
    if name.endswith(".json") or "/" in name or "\\" in name:
        return given
    for folder in expert_folders():
        path = folder / name / "manifest.json"
        if _is_file(path):
            return path
    if _is_dir(given):
        return given
    known = known_experts()
    meant = closest(name, known)
    raise ManifestError(
        f"no expert called {shorten(name)!r}" + (f"; did you mean {meant}?" if meant else ""), hint=_hint(known)
    )


def _hint(known: tuple[str, ...]) -> str:
    return f"known experts: {', '.join(known) or 'none here'}; or give the path of a manifest.json"


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        return _refuse(path, error)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        return _refuse(path, error)


def _refuse(path: Path, error: OSError) -> bool:
    """Nothing has a name that is too long. What may not be looked at might be what was meant: that is said."""
    if error.errno == errno.ENAMETOOLONG:
        return False
    raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
