"""Catalogue of known base models (bases.csv), and lookup of models on this disk. Nothing is downloaded.

The numbers come from each model's published config.json. A test compares every entry with the parameter count of
transformers on the meta device, and most of them with their published totals.
"""

from __future__ import annotations

import csv
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from launcher.core.errors import InputError, Problem
from launcher.core.run_paths import expand_home
from launcher.core.units import mib_to_bytes

BaseKeys = Mapping[str, str | int | bool]  # the keys of a config.json that decide the shape

TINY_BASE_NAME = "launcher/tiny"  # included in this project for the smoke profile
TINY_BASE_FOLDER = Path(__file__).resolve().parent / "tiny_base"

_MAX_CONFIG_MIB = 4
# Parts of a name that describe tuning or publication, not size.
_TUNING_WORDS = frozenset({"instruct", "base", "it", "chat", "hf", "pt", "meta"})


def _make_keys(row: Mapping[str, str]) -> BaseKeys:
    """Convert a row of the catalogue to the keys of a config.json; an empty cell is a missing key."""
    numbers = {key: json.loads(cell) for key, cell in row.items() if cell and key not in ("model_type", "names")}
    return MappingProxyType({"model_type": row["model_type"], **numbers})


# One row per shape, with every published name that has it. Base and tuned models of some families differ in context
# length and are separate rows.
_FILE = files("launcher.base_models") / "bases.csv"
BASES: Mapping[str, BaseKeys] = MappingProxyType(
    {
        name: _make_keys(row)
        for row in csv.DictReader(_FILE.read_text(encoding="utf-8").splitlines())
        for name in row["names"].split()
    }
)


def get_last_component(name: str) -> str:
    """Return the last component of a hub name or path (also of a Windows path), such as `Qwen3-0.6B`."""
    parts = [part for part in re.split(r"[\\/]+", name.strip()) if part not in ("", ".", "..")]
    return parts[-1] if parts else ""


def lookup_base(name: str) -> BaseKeys | None:
    """Return a catalogue entry by full name, last component, or name without words such as Instruct, or None."""
    for spelling in (str.lower, _short_name, _size_name):
        spelled = spelling(name)
        found = [keys for known, keys in BASES.items() if spelling(known) == spelled]
        if found and all(keys == found[0] for keys in found):
            return found[0]
    return None


def _short_name(name: str) -> str:
    return get_last_component(name).lower()


def _size_name(name: str) -> str:
    return "-".join(word for word in _short_name(name).split("-") if word not in _TUNING_WORDS)


def suggest_bases(name: str, search: Sequence[Path] = ()) -> tuple[str, ...]:
    """Return similar names, best first, from the catalogue and from folders under `search`."""
    local = (config.parent.name for folder in search for config in folder.glob("*/config.json"))
    full_names = {_short_name(known): known for known in (*BASES, *local)}
    return tuple(full_names[match] for match in difflib.get_close_matches(_short_name(name), full_names, 3, 0.7))


def find_config(name: str, search: Sequence[Path]) -> Path | None:
    """Return the config.json of a base model on this disk: a path, under `search`, or in the Hugging Face cache."""
    if not get_last_component(name):
        return None
    return next((path for path in _candidates(name, search) if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    """Return whether a path is a file; False also for invalid paths, such as a name of a thousand letters."""
    try:
        return path.is_file()
    except OSError:
        return False


def _candidates(name: str, search: Sequence[Path]) -> Iterator[Path]:
    given = Path(expand_home(name))
    if given.name == "config.json":
        yield given
    yield given / "config.json"
    parts = [part for part in re.split(r"[\\/]+", name) if part not in ("", ".", "..")]
    for folder in search:
        yield folder / parts[-1] / "config.json"
        yield folder.joinpath(*parts[-2:], "config.json")
    yield from _cached_configs(parts)


def get_hub_cache() -> Path:
    """Return the cache folder of huggingface_hub, determined by the same environment variables."""
    environ = os.environ
    if explicit := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(expand_home(explicit))
    if home := environ.get("HF_HOME"):
        return Path(expand_home(home)) / "hub"
    return Path(expand_home(environ.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface" / "hub"


def _cached_configs(parts: Sequence[str]) -> Iterator[Path]:
    """Yield cached configs of `org/name`, or of the only model called `name`: main's snapshot, then newest first."""
    suffix = "--".join(("models", *parts)) if len(parts) == 2 else f"--{parts[-1]}"
    try:
        repositories = [entry for entry in get_hub_cache().iterdir() if entry.name.lower().endswith(suffix.lower())]
        if len(repositories) == 1:
            yield from _snapshots(repositories[0])
    except OSError:
        return


def _snapshots(repository: Path) -> Iterator[Path]:
    main = repository / "refs" / "main"
    if _is_file(main):
        yield repository / "snapshots" / main.read_text().strip() / "config.json"
    folders = sorted((repository / "snapshots").iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    yield from (folder / "config.json" for folder in folders)


def load_config(path: Path) -> Mapping[str, object]:
    """Return the keys of a config.json; errors in broken files name line and column."""
    problem, hint = "", "save the model again, or name another folder"
    try:
        if path.stat().st_size > mib_to_bytes(_MAX_CONFIG_MIB):
            problem = f"is larger than {_MAX_CONFIG_MIB} MiB: not a model configuration"
        else:
            config = json.loads(path.read_bytes().decode("utf-8-sig"))
            if isinstance(config, dict):
                return config
            problem = f"contains a {type(config).__name__} instead of a JSON object"
    except json.JSONDecodeError as error:
        problem = f"broken JSON at line {error.lineno}, column {error.colno}: {error.msg}"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
    except (OSError, RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        problem = f"cannot be read: {error}"
    raise InputError("a base model's configuration cannot be read", (Problem(where=str(path), what=problem),), hint)
