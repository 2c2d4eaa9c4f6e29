"""JSON Schema of a manifest for editors, and the documentation of the manifest's fields.

The documentation of a field is the string below it in its class. pydantic can read these strings too
(`use_attribute_docstrings`), but that adds 60 ms to every command; only the schema and docs/EXPERT_FORMAT.md need them.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from launcher.manifest.model import Manifest
from launcher.manifest.strict_model import find_models


def render_json_schema() -> str:
    """Return the JSON Schema of a manifest as text. It accepts schema 1.0 and 2.0, and comments in every object."""
    schema = Manifest.model_json_schema()
    schema["title"] = "Expert manifest"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    _add_descriptions(schema)
    _accept_schema_1(schema)
    _accept_comments(schema)
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _add_descriptions(schema: dict[str, Any]) -> None:
    for model in list_models(Manifest):
        node = schema if model is Manifest else schema["$defs"][model.__name__]
        for name, text in describe_fields(model).items():
            node["properties"][name]["description"] = text


def _accept_schema_1(schema: dict[str, Any]) -> None:
    """Accept `base_model` and `adapters` at the top level instead of `base_models`."""
    properties = schema["properties"]
    properties["base_model"] = {"$ref": "#/$defs/BaseModelEntry"}
    properties["adapters"] = {"type": "array", "items": {"$ref": "#/$defs/Adapter"}}
    properties["$schema"] = {"type": "string"}
    schema["required"].remove("base_models")
    schema["oneOf"] = [{"required": ["base_model"]}, {"required": ["base_models"]}]


def _accept_comments(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("additionalProperties") is False:
            node["patternProperties"] = {"^_": {}}
        for value in list(node.values()):
            _accept_comments(value)
    elif isinstance(node, list):
        for item in node:
            _accept_comments(item)


@cache
def describe_fields(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the documentation of each field that has one."""
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__]))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def list_models(model: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    """Return a model and all models nested in it, without duplicates."""
    models = {model: None}
    for field in model.model_fields.values():
        for inner in find_models(field.annotation):
            models |= dict.fromkeys(list_models(inner))
    return tuple(models)
