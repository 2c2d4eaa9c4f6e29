"""What a field of the manifest does: the text below it in its class, read from the source.

pydantic can do the same (`use_attribute_docstrings`), at the cost of 60 ms whenever anything is planned. Only the
schema for editors and docs/EXPERT_FORMAT.md need these texts.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel


@cache
def describe_fields(model: type[BaseModel]) -> Mapping[str, str]:
    """Field -> its text; a field without one is not in it."""
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__]))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    return {name: text for field, below in pairwise(body) if (name := _name(field)) and (text := _text(below))}


def list_models(model: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    """This one and those inside it, each once."""
    found = {model: None}
    for field in model.model_fields.values():
        for inner in find_models(field.annotation):
            found |= dict.fromkeys(list_models(inner))
    return tuple(found)


def find_models(annotation: object) -> Iterator[type[BaseModel]]:
    """The models that a field's type mentions: itself, in a union, in a list or in a map."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, tuple, dict, Annotated):
        for argument in get_args(annotation):
            yield from find_models(argument)


def _name(node: ast.stmt) -> str | None:
    return node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None


def _text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None
