"""Published forms -> today's. Schema 1.0 had one `base_model` and its `adapters` at the top; 2.0 has `base_models`."""

from __future__ import annotations

import re

from launcher.errors import ManifestError
from launcher.manifest.reading import Json

V1_ONLY_KEYS = ("base_model", "adapters")


def is_schema_1(tree: dict[str, Json]) -> bool:
    return "base_model" in tree or tree.get("schema_version") == "1.0"


def upgrade(tree: dict[str, Json]) -> dict[str, Json]:
    """The result says that it is of schema 2.0: what is written back must be read as what it is."""
    if not is_schema_1(tree):
        return tree
    _check_one_form(tree)
    rest = {key: value for key, value in tree.items() if key not in V1_ONLY_KEYS}
    if rest.get("schema_version") == "1.0":
        rest["schema_version"] = "2.0"
    base = tree.get("base_model")
    if base is None:
        return rest
    adapters = {"adapters": tree["adapters"]} if "adapters" in tree else {}
    return {**rest, "base_models": [{**base, **adapters} if isinstance(base, dict) else base]}


def _check_one_form(tree: dict[str, Json]) -> None:
    if "base_models" not in tree:
        return
    if "base_model" in tree:
        raise ManifestError(
            "the manifest has both `base_model` (schema 1.0) and `base_models` (schema 2.0)", hint="keep base_models"
        )
    raise ManifestError(
        "the manifest has schema_version 1.0, but `base_models` is of schema 2.0", hint='write "schema_version": "2.0"'
    )


def path_in_schema_1(path: str) -> str:
    """Where a path of today's form stood in the 1.0 file that the user wrote."""
    path = re.sub(r"^base_models\[0\]\.adapters\b", "adapters", path)
    return re.sub(r"^base_models(\[0\])?", "base_model", path)
