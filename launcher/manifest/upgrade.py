"""Upgrade of schema 1.0, with one `base_model` and its `adapters` at the top level, to schema 2.0."""

from __future__ import annotations

import re

from launcher.core.errors import ManifestError
from launcher.manifest.parse_json import Json

V1_ONLY_KEYS = ("base_model", "adapters")


def is_schema_1(tree: dict[str, Json]) -> bool:
    """Return whether a manifest has schema 1.0."""
    return "base_model" in tree or tree.get("schema_version") == "1.0"


def upgrade(tree: dict[str, Json]) -> dict[str, Json]:
    """Return the manifest in schema 2.0, including its schema_version."""
    if not is_schema_1(tree):
        return tree
    if "base_models" in tree:
        if "base_model" in tree:
            what, hint = "both `base_model` (schema 1.0) and `base_models` (schema 2.0)", "keep base_models"
        else:
            what, hint = "schema_version 1.0, but `base_models` requires schema 2.0", 'write "schema_version": "2.0"'
        raise ManifestError(f"the manifest has {what}", hint=hint)
    rest = {key: value for key, value in tree.items() if key not in V1_ONLY_KEYS}
    if rest.get("schema_version") == "1.0":
        rest["schema_version"] = "2.0"
    base = tree.get("base_model")
    if base is None:
        return rest
    adapters = {"adapters": tree["adapters"]} if "adapters" in tree else {}
    return {**rest, "base_models": [{**base, **adapters} if isinstance(base, dict) else base]}


def path_in_schema_1(path: str) -> str:
    """Return the path in the user's 1.0 file for a path in the upgraded manifest."""
    path = re.sub(r"^base_models\[0\]\.adapters\b", "adapters", path)
    return re.sub(r"^base_models(\[0\])?", "base_model", path)
