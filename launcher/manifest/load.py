"""Loading and validation of manifest files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.core.errors import ManifestError, Problem
from launcher.manifest.cache_dir import CACHE_KEY, find_cache_problem
from launcher.manifest.model import Manifest
from launcher.manifest.overrides import apply_overrides, list_overridden_keys
from launcher.manifest.parse_json import read_json_object, walk_keys
from launcher.manifest.problems import MAX_REPORTED, find_problems
from launcher.manifest.upgrade import V1_ONLY_KEYS, is_schema_1, path_in_schema_1, upgrade


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedManifest:
    """A validated manifest, its file, and the keys that the file contains."""

    manifest: Manifest
    path: Path
    keys: tuple[str, ...]
    overridden_keys: frozenset[str] = frozenset()  # dotted
    schema_version: str = "2.0"  # of the file; the manifest itself is always upgraded to 2.0

    @property
    def folder(self) -> Path:
        """Folder to which relative paths in the manifest refer."""
        return self.path.parent


def load_manifest(path: Path, overrides: Sequence[str] = ()) -> LoadedManifest:
    """Read, override, upgrade and validate a manifest; raises ManifestError with all problems."""
    raw = apply_overrides(read_json_object(path), overrides)
    is_v1 = is_schema_1(raw)
    tree = upgrade(raw)
    problems = find_problems(tree, Manifest, V1_ONLY_KEYS if is_v1 else ())
    manifest = None if problems else Manifest.model_validate_json(json.dumps(tree))
    cache_dir = manifest.training.config.pretokenized_cache if manifest is not None else None
    cache_problem = find_cache_problem(cache_dir) if cache_dir is not None else None
    if cache_problem is not None:
        problems.append(Problem(where=CACHE_KEY, what=cache_problem))
    if manifest is None or problems:
        if is_v1:
            problems = [Problem(where=path_in_schema_1(problem.where), what=problem.what) for problem in problems]
        count = len(problems) if len(problems) <= MAX_REPORTED else "many"
        raise ManifestError(
            f"{path}: {count} problem{'' if count == 1 else 's'}",
            tuple(problems),
            hint="`launcher schema` prints the JSON Schema of a manifest",
        )
    return LoadedManifest(
        manifest=manifest,
        path=path,
        keys=tuple(walk_keys(tree)),
        overridden_keys=list_overridden_keys(overrides),
        schema_version="1.0" if is_v1 else "2.0",
    )


def manifest_sha256(manifest: Manifest) -> str:
    """Return a hash of the content, independent of comments, key order and whitespace."""
    canonical = json.dumps(manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
