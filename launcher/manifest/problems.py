"""What pydantic found and what the key check found -> one list of problems in the user's words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.errors import Problem
from launcher.manifest.keys import UnknownKey, find_unknown_keys, join
from launcher.manifest.reading import Json
from launcher.manifest.spelling import closest

_TYPE_WORDS: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
    "none_required": "null",
}


def find_problems(tree: dict[str, Json], model: type[BaseModel], extra_keys: tuple[str, ...] = ()) -> list[Problem]:
    """All problems of a tree at once. `extra_keys` are further names that a misspelt top-level key may have meant."""
    unknown = find_unknown_keys(tree, model)
    problems = [_unknown_problem(item, model, extra_keys) for item in unknown]
    try:
        model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        suspected = {join(item.path, item.meant) for item in unknown if item.meant}
        problems += _value_problems(error.errors(include_url=False), tree, suspected)
    return problems


def _unknown_problem(item: UnknownKey, model: type[BaseModel], extra_keys: tuple[str, ...]) -> Problem:
    meant = item.meant
    if not item.path and extra_keys:
        meant = closest(item.key, (*extra_keys, *model.model_fields)) or meant
    elsewhere = None if meant else _same_key_elsewhere(item.key, model)
    what = "unknown key"
    if meant:
        what += f"; did you mean {meant}?"
    elif elsewhere:
        what += f"; did you mean {elsewhere}?"
    return Problem(where=join(item.path, item.key), what=what)


def _same_key_elsewhere(key: str, model: type[BaseModel], path: str = "") -> str | None:
    """A key in the wrong section: `learning_rate` at the top belongs into training.config."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if key in inner.model_fields:
                return join(join(path, name), key)
            found = _same_key_elsewhere(key, inner, join(path, name))
            if found:
                return found
    return None


def _value_problems(errors: Iterable[ErrorDetails], tree: Json, suspected: set[str]) -> list[Problem]:
    """One problem a place. Keys that are probably misspelt are not called missing too."""
    by_place: dict[str, list[str]] = {}
    for error in errors:
        place = _place(error, tree)
        if error["type"] == "extra_forbidden" or (error["type"] == "missing" and place in suspected):
            continue
        if error["type"] == "too_short" and error["input"]:
            continue  # pydantic calls a list short when its entries failed: those are told by themselves
        if error["type"] == "value_error":
            for line in str(error["ctx"]["error"]).split("\n"):  # rules over several keys: "key: what is wrong"
                key, _, what = line.partition(": ")
                by_place.setdefault(join(place, key), []).append(what)
        else:
            by_place.setdefault(place, []).append(_message(error))
    return [Problem(where=place, what=_joined(messages)) for place, messages in by_place.items()]


def _place(error: ErrorDetails, tree: Json) -> str:
    """pydantic's location without the names of union members, which are not in the user's file."""
    path, node = "", tree
    for depth, part in enumerate(error["loc"]):
        is_missing = error["type"] == "missing" and depth == len(error["loc"]) - 1
        if isinstance(part, int):
            path += f"[{part}]"
            node = node[part] if isinstance(node, list) and part < len(node) else None
        elif isinstance(node, dict) and (part in node or is_missing):
            path = join(path, part)
            node = node.get(part)
    return path


def _message(error: ErrorDetails) -> str:
    kind, value = error["type"], error["input"]
    context = error.get("ctx", {})
    if kind == "missing":
        return "missing"
    if kind in _TYPE_WORDS:
        return f"must be {_TYPE_WORDS[kind]}, not {_shown(value)}"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {_shown(value)}"
    if kind == "string_pattern_mismatch":
        return f"{_shown(value)} does not match {context['pattern']}"
    if kind == "too_short":
        return f"needs at least {context['min_length']} entry"
    if kind == "string_too_short":
        return "must not be empty"
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    signs = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    if kind in bounds:
        bound = bounds[kind]
        return f"must be {signs[bound]} {context[bound]:g}, not {_shown(value)}"
    return f"{error['msg']} (got {_shown(value)})"


def _joined(messages: list[str]) -> str:
    """The members of a union each complain about the same value: "must be A, not X" and "must be B, not X" are one."""
    unique = list(dict.fromkeys(messages))
    parts = [message.removeprefix("must be ").rpartition(", not ") for message in unique]
    if len(unique) > 1 and all(m.startswith("must be ") and part[1] for m, part in zip(unique, parts, strict=True)):
        return f"must be {' or '.join(part[0] for part in parts)}, not {parts[0][2]}"
    return "; ".join(unique)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
