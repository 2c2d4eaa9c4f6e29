"""File -> Manifest. After this, nobody asks whether a key is there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ManifestError, Problem
from launcher.manifest.model import Manifest
from launcher.manifest.overrides import apply_overrides, find_given_keys
from launcher.manifest.problems import MAX_TOLD, find_problems
from launcher.manifest.reading import read_json_object, walk_keys
from launcher.manifest.upgrade import V1_ONLY_KEYS, is_schema_1, path_in_schema_1, upgrade


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedManifest:
    """A manifest and what the file itself was: where it lay and which keys it really held."""

    manifest: Manifest
    path: Path
    keys: tuple[str, ...]
    given_keys: frozenset[str] = frozenset()  # set by overrides, dotted
    schema_version: str = "2.0"  # as written; the manifest itself is always of today's form

    @property
    def folder(self) -> Path:
        """Relative paths in a manifest start here."""
        return self.path.parent


def load_manifest(path: Path, overrides: Sequence[str] = ()) -> LoadedManifest:
    raw = read_json_object(path)
    raw = apply_overrides(raw, overrides)
    old = is_schema_1(raw)
    tree = upgrade(raw)
    problems = find_problems(tree, Manifest, V1_ONLY_KEYS if old else ())
    if problems:
        shown = (
            tuple(Problem(where=path_in_schema_1(p.where), what=p.what) for p in problems) if old else tuple(problems)
        )
        count = "1 problem" if len(shown) == 1 else f"{len(shown) if len(shown) <= MAX_TOLD else 'many'} problems"
        raise ManifestError(f"{path}: {count}", shown, hint="`launcher schema` prints what a manifest may hold")
    manifest = Manifest.model_validate_json(json.dumps(tree))
    return LoadedManifest(
        manifest=manifest,
        path=path,
        keys=tuple(walk_keys(tree)),
        given_keys=find_given_keys(overrides),
        schema_version="1.0" if old else "2.0",
    )


def manifest_sha256(manifest: Manifest) -> str:
    """Of the meaning, not of the bytes: comments, order and spacing don't count."""
    canonical = json.dumps(manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
