"""Strict reading of JSON files, with a specific message for every kind of invalid file."""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from launcher.core.errors import ManifestError, Problem, hint_for
from launcher.core.units import MIB

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

MAX_MANIFEST_BYTES = 4 * MIB
MAX_DEPTH = 100  # published manifests have seven levels; far below Python's recursion limit
_MAX_DUPLICATES_REPORTED = 20


def read_json_object(path: Path) -> dict[str, Json]:
    """Return the JSON object of a file, dropping comments (keys that start with `_`) and `$schema`."""
    tree = _parse(_read_text(path), path)
    if is_too_deep(tree):
        raise _make_depth_error(path)
    if not isinstance(tree, dict):
        raise ManifestError(f"{path}: expected a JSON object {{...}}, but this file contains {_describe_kind(tree)}")
    return {
        key: _without_comments(value) for key, value in tree.items() if not key.startswith("_") and key != "$schema"
    }


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ManifestError(
            f"{path}, line {line}: not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start})",
            hint="save the file as UTF-8",
        ) from None
    except OSError as error:
        raise ManifestError(f"{shorten(str(path))}: cannot be read: {error.strerror}", hint=hint_for(error)) from None


def _read_bytes(path: Path) -> bytes:
    """Read a regular file only: reading a device or a pipe may never end."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        has_manifest = (path / "manifest.json").is_file()
        what = "" if has_manifest else " without a manifest.json"
        hint = f"pass the file: {path / 'manifest.json'}" if has_manifest else "pass the path of a manifest.json"
        raise ManifestError(f"{path} is a directory{what}", hint=hint)
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"{path} is not a file", hint="a manifest must be a regular file, not a pipe or a device")
    with path.open("rb") as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"{path} has {status.st_size / MIB:.0f} MiB; the limit is {MAX_MANIFEST_BYTES // MIB} MiB",
            hint="if this is data, set training.dataset.path to it",
        )
    return content


def shorten(text: str, width: int = 60) -> str:
    """Truncate a text for a message."""
    return text if len(text) <= width else text[: width - 3] + "..."


def _explain_syntax(text: str, error: json.JSONDecodeError) -> str:
    """Return the probable cause of a syntax error: Python reports the place where the next value should begin."""
    before, rest = text[: error.pos].rstrip(), text[error.pos :].lstrip(", \t\r\n")
    line = before.count("\n") + 1
    if rest.startswith(("//", "/*", "#")):
        return 'JSON has no comments: use a key that begins with _, such as "_comment"'
    if rest.startswith(("}", "]")) and (before.endswith(",") or text.startswith(",", error.pos)):
        return f"remove the comma at the end of line {line}"
    if rest.startswith("'"):
        return "JSON needs double quotes"
    if error.msg.startswith("Expecting ',' delimiter") and line < error.lineno:
        return f"a comma is probably missing at the end of line {line}"
    return ""


def _parse(text: str, path: Path) -> Json:
    if not text.strip():
        raise ManifestError(f"{path} is empty", hint="`launcher new` writes a manifest from your rows")
    duplicates: list[str] = []

    def make_object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            duplicates.extend(sorted(key for key, count in counts.items() if count > 1 and not key.startswith("_")))
        return tree

    def refuse_constant(name: str) -> NoReturn:
        raise ManifestError(f"{path}: {name} is not JSON", hint="write a number, or remove the key")

    try:
        tree: Json = json.loads(
            text, object_pairs_hook=make_object, parse_constant=refuse_constant, parse_float=_parse_float
        )
    except json.JSONDecodeError as error:
        snippet = text.splitlines()[error.lineno - 1].strip()[:80] if text.splitlines()[error.lineno - 1 :] else ""
        raise ManifestError(
            f"{path}, line {error.lineno}, column {error.colno}: broken JSON: {error.msg}",
            (Problem(where="", what=snippet),) if snippet else (),
            hint=_explain_syntax(text, error),
        ) from None
    except RecursionError:
        raise _make_depth_error(path) from None
    except ValueError as error:  # an infinite float, or an integer with more digits than Python converts
        raise ManifestError(f"{path}: a number is out of range: {error}") from None
    if duplicates:
        problems = tuple(
            Problem(where=_find_second_line(text, key), what=f"duplicate key {shorten(key)!r}")
            for key in duplicates[:_MAX_DUPLICATES_REPORTED]
        )
        if len(duplicates) > len(problems):
            problems += (Problem(where="", what=f"and {len(duplicates) - len(problems):,} more"),)
        raise ManifestError(f"{path}: duplicate keys", problems, hint="remove all but one")
    return tree


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(shorten(text))
    return number


def _find_second_line(text: str, key: str) -> str:
    """Return the approximate line of a duplicate key: the second line of the text that contains it."""
    lines = [
        number for number, line in enumerate(text.splitlines(), 1) if f"{json.dumps(key)}:" in line.replace(" :", ":")
    ]
    return f"line {lines[1]}" if len(lines) > 1 else ""


def is_too_deep(tree: Json) -> bool:
    """Return whether a tree has more than MAX_DEPTH levels, without recursion."""
    level: list[Json] = [tree]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def _make_depth_error(path: Path) -> ManifestError:
    return ManifestError(f"{path}: nested too deeply to be a manifest (more than {MAX_DEPTH} levels)")


def _without_comments(node: Json) -> Json:
    if isinstance(node, dict):
        return {key: _without_comments(value) for key, value in node.items() if not key.startswith("_")}
    if isinstance(node, list):
        return [_without_comments(item) for item in node]
    return node


def walk_keys(node: Json, path: str = "") -> Iterator[str]:
    """Yield every key of a tree as a dotted path with list positions in brackets."""
    if isinstance(node, dict):
        for key, value in node.items():
            here = f"{path}.{key}" if path else key
            yield here
            yield from walk_keys(value, here)
    elif isinstance(node, list):
        for position, item in enumerate(node):
            yield from walk_keys(item, f"{path}[{position}]")


def _describe_kind(node: Json) -> str:
    if isinstance(node, list):
        return "a list"
    return "a string" if isinstance(node, str) else json.dumps(node)
