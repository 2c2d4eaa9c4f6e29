"""JSON read strictly, and compared as values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import NoReturn, TypeAlias

Json: TypeAlias = "bool | int | Decimal | str | list[Json] | dict[str, Json] | None"
Path: TypeAlias = "tuple[str | int, ...]"
MAX_DEPTH = 200  # RFC 8259 lets a reader set one; no row comes near it, and whoever walks a tree relies on it
_MAX_NUMBER_CHARACTERS = 4000  # below the interpreter's own limit, whose message is not about JSON
_SPACE = " \t\r\n"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def load_json(text: str) -> Json:
    """Raises ValueError with a sentence. No NaN, no key twice, no comment, no byte order mark, no text that cannot be
    UTF-8; numbers keep every digit."""
    try:
        tree: Json = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        what = "is empty" if not text.strip(_SPACE) else f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise ValueError(what) from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(tree) > MAX_DEPTH:
        raise ValueError("is nested too deeply")
    if _LONE_SURROGATE.search(text) or ("\\u" in text and _has_lone_surrogate(tree)):
        raise ValueError("holds half a character (a lone surrogate)")
    return tree


def is_equal(one: Json, other: Json) -> bool:
    """By value: objects whatever the order of their keys, numbers whatever their spelling (JSON has one kind of number:
    1, 1.0 and 1e0 are the same), every digit counted; arrays by their order; strings by their characters."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(part, other[key]) for key, part in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return one == other


def find_difference(answer: Json, reference: Json, path: Path = ()) -> str:
    """The first one, in words; empty where they are equal."""
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


def read_leaves(tree: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """What holds nothing further, with the way to it; an empty object or array is a leaf, too."""
    if isinstance(tree, dict) and tree:
        for key, part in tree.items():
            yield from read_leaves(part, (*path, key))
    elif isinstance(tree, list) and tree:
        for index, part in enumerate(tree):
            yield from read_leaves(part, (*path, index))
    else:
        yield path, tree


def format_path(path: Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return _cut(text) or "the whole"


def _format_value(value: Json) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return _cut(str(value) if isinstance(value, int | Decimal) and not isinstance(value, bool) else json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _make_object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"has the key {_cut(json.dumps(twice))} twice")
    return tree


def _read_number(text: str, kind: type[int] | type[Decimal]) -> int | Decimal:
    if len(text) > _MAX_NUMBER_CHARACTERS:
        raise ValueError(f"has a number of {len(text):,} characters")
    try:
        return kind(text)
    except InvalidOperation:
        raise ValueError(f"has a number that is too large: {_cut(text)}") from None


def _refuse(word: str) -> NoReturn:
    """Python's own reader takes NaN and Infinity."""
    raise ValueError(f"has {word}, which is not JSON")


def _depth(tree: Json) -> int:
    """Level by level: a walk down could itself go too deep."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
    return depth


def _has_lone_surrogate(tree: Json) -> bool:
    """Escapes that Python joins to whole characters are none."""
    return _LONE_SURROGATE.search(json.dumps(tree, ensure_ascii=False, default=str)) is not None


_DECODER = json.JSONDecoder(
    object_pairs_hook=_make_object,
    parse_constant=_refuse,
    parse_int=partial(_read_number, kind=int),
    parse_float=partial(_read_number, kind=Decimal),
)
