"""Parse the object of a row strictly, and check it against its schema and its text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

from experts.generator.json_objects import dump
from experts.generator.json_rows import is_repair
from experts.generator.values import format_long_date

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def check_row(row: Mapping[str, str]) -> None:
    """Check a row; raises ValueError, or jsonschema's SchemaError or ValidationError."""
    Draft202012Validator.check_schema(load_strictly(row["schema"]))
    check_object(row)


def check_object(row: Mapping[str, str]) -> None:
    """Check everything except the schema itself, whose check takes most of the time."""
    tree, schema = load_strictly(row["object"]), load_strictly(row["schema"])
    if not isinstance(tree, dict) or dump(tree) != row["object"]:
        raise ValueError(f"not a compact object: {row['object']}")
    # A key that is not in the schema would be invented. Schemas omit additionalProperties to stay short.
    closed = _close(schema)
    Draft202012Validator(closed, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(tree)
    if is_repair(dict(row)):
        _check_broken(row["text"].split("\n", 1)[1])
    for text in _read_strings(tree):
        if text not in row["text"] and not (_DATE.fullmatch(text) and format_long_date(text) in row["text"]):
            raise ValueError(f"{text!r} is not in the text: {row['text']}")


def load_strictly(text: str) -> Any:
    """Parse JSON, rejecting NaN, Infinity and duplicate keys."""
    return json.loads(text, object_pairs_hook=_make_object, parse_constant=_refuse)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError(f"a key stands twice: {[key for key, _ in pairs]}")
    return tree


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _close(schema: Any) -> Any:
    """Return the schema with additionalProperties off at every depth."""
    if isinstance(schema, list):
        return [_close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close(part) for key, part in schema.items()}
    return closed | {"additionalProperties": False} if schema.get("type") == "object" else closed


def _check_broken(text: str) -> None:
    try:
        json.loads(text)
    except ValueError:
        return
    raise ValueError(f"there is nothing to repair: {text}")


def _read_strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, list | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _read_strings(part)
