"""Strict JSON parsing, comparison by value, and values that a repaired JSON must keep."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import NoReturn, TypeAlias

from launcher.judges.base import has_lone_surrogate

Json: TypeAlias = "bool | int | Decimal | str | list[Json] | dict[str, Json] | None"
Path: TypeAlias = "tuple[str | int, ...]"
MAX_DEPTH = 200  # RFC 8259 allows a limit; recursive functions here rely on it
_MAX_NUMBER_CHARACTERS = 4000  # below the interpreter's own limit
_SPACE = " \t\r\n"
# `Repair this JSON:`, `Fix the JSON so that it fits the schema:`, then the text.
_ORDER = re.compile(r"\s*[^\n{\[]*\b(?:repair|fix|correct|broken|invalid|malformed)\b[^\n{\[]*:\s*(?=[{\[\"'])", re.I)


def load_json(text: str) -> Json:
    """Parse JSON strictly; raises ValueError.

    Rejects NaN, duplicate keys, comments, a byte order mark and lone surrogates; numbers keep every digit.
    """
    try:
        tree: Json = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        what = "is empty" if not text.strip(_SPACE) else f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise ValueError(what) from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(tree) > MAX_DEPTH:
        raise ValueError("is nested too deeply")
    if has_lone_surrogate(text) or ("\\u" in text and _contains_lone_surrogate(tree)):
        raise ValueError("contains a lone surrogate")
    return tree


def is_equal(one: Json, other: Json) -> bool:
    """Return whether two JSON values are equal; key order and the spelling of numbers (1, 1.0, 1e0) do not matter."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(part, other[key]) for key, part in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return one == other


def find_difference(answer: Json, reference: Json, path: Path = ()) -> str:
    """Describe the first difference between two JSON values; empty if they are equal."""
    if is_equal(answer, reference):
        return ""
    if isinstance(answer, dict) and isinstance(reference, dict):
        for word, keys in (("lacks", reference.keys() - answer.keys()), ("adds", answer.keys() - reference.keys())):
            if keys:
                return f"{word} {format_path((*path, min(keys)))}"
        pairs = [(key, part, reference[key]) for key, part in answer.items()]
        return next(filter(None, (find_difference(part, right, (*path, key)) for key, part, right in pairs)))
    if isinstance(answer, list) and isinstance(reference, list):
        if len(answer) != len(reference):
            return f"{format_path(path)} has {len(answer)} items, not {len(reference)}"
        parts = enumerate(zip(answer, reference, strict=True))
        return next(filter(None, (find_difference(part, right, (*path, index)) for index, (part, right) in parts)))
    return f"{format_path(path)} is {_format_value(answer)}, not {_format_value(reference)}"


def iterate_leaves(tree: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Yield the leaves of a tree with their paths; empty objects and arrays are leaves, too."""
    if isinstance(tree, dict) and tree:
        for key, part in tree.items():
            yield from iterate_leaves(part, (*path, key))
    elif isinstance(tree, list) and tree:
        for index, part in enumerate(tree):
            yield from iterate_leaves(part, (*path, index))
    else:
        yield path, tree


def format_path(path: Path) -> str:
    """Format a path for a message: `a.b[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return _cut(text) or "the root"


def _format_value(value: Json) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return _cut(str(value) if isinstance(value, int | Decimal) and not isinstance(value, bool) else json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _make_object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"has the key {_cut(json.dumps(duplicate))} twice")
    return tree


def _read_number(text: str, kind: type[int] | type[Decimal]) -> int | Decimal:
    if len(text) > _MAX_NUMBER_CHARACTERS:
        raise ValueError(f"has a number of {len(text):,} characters")
    try:
        return kind(text)
    except InvalidOperation:
        raise ValueError(f"has a number that is too large: {_cut(text)}") from None


def _refuse(word: str) -> NoReturn:
    """Reject NaN and Infinity, which Python's parser accepts."""
    raise ValueError(f"has {word}, which is not JSON")


def _depth(tree: Json) -> int:
    """Return the depth of a JSON value, computed level by level without recursion."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
    return depth


def _contains_lone_surrogate(tree: Json) -> bool:
    """Return whether a parsed JSON value contains a lone surrogate; the parser has already joined escaped pairs."""
    return has_lone_surrogate(json.dumps(tree, ensure_ascii=False, default=str))


def find_broken(instruction: str) -> str | None:
    """Return the broken JSON in an instruction that asks to repair it; None if it asks for something else."""
    match = _ORDER.match(instruction)
    return instruction[match.end() :] if match else None


def find_lost(broken: str, reference: Json, answer: Json) -> str:
    """Return the path of the first value that a repaired JSON has lost from the broken one; empty if there is none.

    Values of the reference whose key and spelling occur in the broken text must be kept. What the reference had to
    invent (a missing field, the right type) may differ.
    """
    for path, value in iterate_leaves(reference):
        keys = [part for part in path if isinstance(part, str)]
        is_recoverable = (not keys or keys[-1] in broken) and any(spelling in broken for spelling in _spell(value))
        if is_recoverable and not _has_value(answer, path, value):
            return format_path(path)
    return ""


def _spell(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        yield json.dumps(value)[1:-1]
    elif value is None or isinstance(value, bool):
        yield json.dumps(value)
        yield str(value)  # as Python spells it
    elif isinstance(value, int | Decimal):
        yield str(value)
    else:
        yield "{" if isinstance(value, dict) else "["


def _has_value(tree: Json, path: Path, value: Json) -> bool:
    try:
        for part in path:
            tree = tree[part]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return False
    return is_equal(tree, value)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_make_object,
    parse_constant=_refuse,
    parse_int=partial(_read_number, kind=int),
    parse_float=partial(_read_number, kind=Decimal),
)
