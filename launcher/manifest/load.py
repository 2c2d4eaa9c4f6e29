"""Loading and validation of manifest files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.core.errors import ManifestError, Problem
from launcher.manifest.adapter_override import ADAPTER_KEY, adapt_to_adapter, get_config, note_scale
from launcher.manifest.cache_dir import CACHE_KEY, find_cache_problem
from launcher.manifest.model import Manifest
from launcher.manifest.overrides import apply_overrides, list_overridden_keys, remove_nulls, suggest_list
from launcher.manifest.parse_json import Json, read_json_object, walk_keys
from launcher.manifest.problems import MAX_REPORTED, find_problems
from launcher.manifest.upgrade import V1_ONLY_KEYS, is_schema_1, path_in_schema_1, upgrade

_CONFIG = "training.config."
_METRIC_KEY = f"{_CONFIG}metric_for_best_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedManifest:
    """A validated manifest, its file, and the keys that the file contains."""

    manifest: Manifest
    path: Path
    keys: tuple[str, ...]
    overridden_keys: frozenset[str] = frozenset()  # dotted
    notes: tuple[str, ...] = ()  # what overrides change besides their own keys
    schema_version: str = "2.0"  # of the file; the manifest itself is always upgraded to 2.0

    @property
    def folder(self) -> Path:
        """Folder to which relative paths in the manifest refer."""
        return self.path.parent


def load_manifest(path: Path, overrides: Sequence[str] = ()) -> LoadedManifest:
    """Read, override, upgrade and validate a manifest; raises ManifestError with all problems."""
    file_tree = read_json_object(path)
    raw = apply_overrides(file_tree, overrides)
    is_v1 = is_schema_1(raw)
    tree, notes = upgrade(raw), tuple[str, ...]()
    overridden_keys = list_overridden_keys(overrides)
    if ADAPTER_KEY in overridden_keys:
        tree, notes = adapt_to_adapter(tree, upgrade(file_tree), overridden_keys)
    if _METRIC_KEY in overridden_keys and f"{_CONFIG}greater_is_better" not in overridden_keys:
        get_config(tree).pop("greater_is_better", None)  # of the manifest's own metric; follows from the new one
    notes += note_scale(tree, upgrade(file_tree), overridden_keys)
    valid_tree = remove_nulls(tree, overrides)
    problems, manifest = _check(tree, valid_tree, is_v1)
    if manifest is None:
        known = _check(upgrade(file_tree), None, is_v1)[0] if overrides else problems
        by_flags = [problem for problem in problems if problem not in known] if overrides else []
        what = f"--set on {path}" if by_flags == problems else f"{path} with --set" if by_flags else str(path)
        if is_v1:
            problems = [Problem(where=path_in_schema_1(problem.where), what=problem.what) for problem in problems]
        count = len(problems) if len(problems) <= MAX_REPORTED else "many"
        raise ManifestError(
            f"{what}: {count} problem{'' if count == 1 else 's'}",
            tuple(problems),
            hint=suggest_list(overrides, by_flags) or "`launcher schema` prints the JSON Schema of a manifest",
        )
    return LoadedManifest(
        manifest=manifest,
        path=path,
        keys=tuple(walk_keys(valid_tree)),
        overridden_keys=overridden_keys,
        notes=notes,
        schema_version="1.0" if is_v1 else "2.0",
    )


def _check(
    tree: dict[str, Json], without_nulls: dict[str, Json] | None, is_v1: bool
) -> tuple[list[Problem], Manifest | None]:
    """Return the problems of a tree in schema 2.0, and the manifest if there are none."""
    problems = find_problems(tree, Manifest, V1_ONLY_KEYS if is_v1 else (), without_nulls)
    if problems:
        return problems, None
    manifest = Manifest.model_validate_json(json.dumps(tree if without_nulls is None else without_nulls))
    cache_dir = manifest.training.config.pretokenized_cache
    cache_problem = find_cache_problem(cache_dir) if cache_dir is not None else None
    if cache_problem is not None:
        return [Problem(where=CACHE_KEY, what=cache_problem)], None
    return [], manifest


def manifest_sha256(manifest: Manifest) -> str:
    """Return a hash of the content, independent of comments, key order and whitespace."""
    canonical = json.dumps(manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
