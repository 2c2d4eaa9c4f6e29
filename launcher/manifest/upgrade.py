"""Published forms -> today's. Schema 1.0 had one `base_model` and its `adapters` at the top; 2.0 has `base_models`."""

from __future__ import annotations

import re

from launcher.errors import ManifestError
from launcher.manifest.reading import Json

V1_ONLY_KEYS = ("base_model", "adapters")


def is_schema_1(tree: dict[str, Json]) -> bool:
    return "base_model" in tree or tree.get("schema_version") == "1.0"


def upgrade(tree: dict[str, Json]) -> dict[str, Json]:
    if not is_schema_1(tree):
        return tree
    if "base_models" in tree:
        raise ManifestError(
            "the manifest has both `base_model` (schema 1.0) and `base_models` (schema 2.0)", hint="keep base_models"
        )
    rest = {key: value for key, value in tree.items() if key not in V1_ONLY_KEYS}
    base = tree.get("base_model")
    if base is None:
        return rest
    adapters = {"adapters": tree["adapters"]} if "adapters" in tree else {}
    return {**rest, "base_models": [{**base, **adapters} if isinstance(base, dict) else base]}


def path_in_schema_1(path: str) -> str:
    """Where a path of today's form stood in the 1.0 file that the user wrote."""
    path = re.sub(r"^base_models\[0\]\.adapters\b", "adapters", path)
    return re.sub(r"^base_models(\[0\])?", "base_model", path)
