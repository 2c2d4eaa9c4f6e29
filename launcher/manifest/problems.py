"""What pydantic found and what the key check found -> one list of problems in the user's words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.errors import Problem
from launcher.manifest.keys import SYNONYMS, UnknownKey, find_unknown_keys, join
from launcher.manifest.reading import Json, shorten
from launcher.manifest.spelling import closest

MAX_TOLD = 20  # of each kind; a file with more is another file than it was taken for
_LONGEST_KEY = 100

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
    unknown = list(islice(find_unknown_keys(tree, model), MAX_TOLD))
    problems = [_unknown_problem(item, model, extra_keys) for item in unknown]
    try:
        model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True)
        suspected = {join(item.path, item.meant) for item in unknown if item.meant}
        problems += _count_rest(sum(error["type"] == "extra_forbidden" for error in errors), "unknown keys")
        values = _value_problems(errors, tree, suspected)
        problems += values[:MAX_TOLD] + _count_rest(len(values), "wrong values")
    return [_shown_problem(problem) for problem in problems]


def _count_rest(count: int, what: str) -> list[Problem]:
    more = count - MAX_TOLD
    return [Problem(where="", what=f"and {more:,} more {what}")] if more > 0 else []


def _shown_problem(problem: Problem) -> Problem:
    return Problem(where=shorten(problem.where, _LONGEST_KEY), what=problem.what)


def _unknown_problem(item: UnknownKey, model: type[BaseModel], extra_keys: tuple[str, ...]) -> Problem:
    meant = item.meant
    if not item.path and extra_keys:
        meant = closest(item.key, (*extra_keys, *model.model_fields)) or meant
    elsewhere = None if meant else _same_key_elsewhere(SYNONYMS.get(item.key, item.key), model)
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
        if error["type"] == "extra_forbidden":
            continue  # found by the key check, with the key that was meant
        place = _place(error, tree)
        if error["type"] == "missing" and place in suspected:
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
    if kind == "json_invalid":  # the file was read; what its strings say cannot be written
        return f"a string is not Unicode text: {context['error']}"
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
        return f"must be {signs[bound]} {_format_bound(context[bound])}, not {_shown(value)}"
    return f"{error['msg']} (got {_shown(value)})"


def _joined(messages: list[str]) -> str:
    """The members of a union each complain about the same value: "must be A, not X" and "must be B, not X" are one."""
    unique = list(dict.fromkeys(messages))
    parts = [message.removeprefix("must be ").rpartition(", not ") for message in unique]
    if len(unique) > 1 and all(m.startswith("must be ") and part[1] for m, part in zip(unique, parts, strict=True)):
        return f"must be {' or '.join(part[0] for part in parts)}, not {parts[0][2]}"
    return "; ".join(unique)


def _shown(value: object) -> str:
    return shorten(json.dumps(value, default=str, ensure_ascii=False))


def _format_bound(bound: float) -> str:
    return f"{bound:g}" if abs(bound) < 1000 else f"{bound:,.0f}"
