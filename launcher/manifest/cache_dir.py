"""Folder for prepared data, as a manifest names it: inside the data folder, and without other content."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from launcher.core.errors import InputError
from launcher.core.run_paths import get_env_path
from launcher.manifest.locate import list_expert_folders

DATA_DIR_VARIABLE = "LAUNCHER_DATA_DIR"
CACHE_KEY = "training.config.pretokenized_cache"


def get_data_dir() -> Path:
    """Return LAUNCHER_DATA_DIR, or the working directory."""
    return get_env_path(DATA_DIR_VARIABLE) or Path()


def resolve_cache_dir(relative: str) -> Path:
    """Return the folder of prepared data inside the data folder; raises InputError if it is unsuitable."""
    problem = find_cache_problem(relative)
    if problem is not None:
        raise InputError(
            f"{CACHE_KEY}: {problem}",
            hint="use a relative path; LAUNCHER_DATA_DIR moves the data folder to another disk",
        )
    return get_data_dir() / relative


def find_cache_problem(relative: str) -> str | None:
    """Return why a path cannot be the folder of prepared data, or None."""
    try:
        root, path = get_data_dir().resolve(), (get_data_dir() / relative).resolve()
        if Path(relative).is_absolute() or not path.is_relative_to(root):
            return f"{relative!r} is outside the data folder"
        if path == root:
            return f"{relative!r} is the data folder itself; name a folder inside it"
        kept = [(Path(), "the working directory")]
        kept += [(folder, "the experts folder") for folder in (Path("experts"), *list_expert_folders())]
        with suppress(RuntimeError):  # no home directory
            kept.append((Path.home(), "the home directory"))
        resolved = [(folder.resolve(), name) for folder, name in kept]
    except (OSError, RuntimeError, ValueError):  # a loop of symbolic links, or a NUL
        return f"{relative!r} is not a usable path"
    for folder, name in resolved:
        if folder.is_relative_to(path):
            return f"{relative!r} {'is' if folder == path else 'contains'} {name}; name a folder for prepared data only"
    return None
