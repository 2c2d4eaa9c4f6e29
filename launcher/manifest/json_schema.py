"""The JSON Schema of a manifest, for editors: both published forms, comments allowed everywhere."""

from __future__ import annotations

import json
from typing import Any

from launcher.manifest.described import describe_fields, list_models
from launcher.manifest.model import Manifest

_TITLE = "Expert manifest"
_COMMENTS: dict[str, dict[str, str]] = {"^_": {}}


def render_json_schema() -> str:
    return json.dumps(_make_json_schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _make_json_schema() -> dict[str, Any]:
    schema = Manifest.model_json_schema()
    schema["title"] = _TITLE
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    _add_descriptions(schema)
    _accept_schema_1(schema)
    _accept_comments(schema)
    return schema


def _add_descriptions(schema: dict[str, Any]) -> None:
    """What editors show beside a key."""
    for model in list_models(Manifest):
        node = schema if model is Manifest else schema["$defs"][model.__name__]
        for name, text in describe_fields(model).items():
            node["properties"][name]["description"] = text


def _accept_schema_1(schema: dict[str, Any]) -> None:
    """1.0 has one `base_model` and its `adapters` at the top, 2.0 a list of `base_models`."""
    properties = schema["properties"]
    properties["base_model"] = {"$ref": "#/$defs/BaseModelEntry"}
    properties["adapters"] = {"type": "array", "items": {"$ref": "#/$defs/Adapter"}}
    properties["$schema"] = {"type": "string"}
    schema["required"].remove("base_models")
    schema["oneOf"] = [{"required": ["base_model"]}, {"required": ["base_models"]}]


def _accept_comments(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("additionalProperties") is False:
            node["patternProperties"] = _COMMENTS
        for value in list(node.values()):
            _accept_comments(value)
    elif isinstance(node, list):
        for item in node:
            _accept_comments(item)
