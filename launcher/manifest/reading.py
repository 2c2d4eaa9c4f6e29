"""Manifest file -> JSON tree, strictly: every way in which a file can be unreadable has a message of its own."""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from launcher.errors import ManifestError, Problem
from launcher.units import MIB

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

MAX_MANIFEST_BYTES = 4 * MIB
MAX_DEPTH = 100  # published manifests have seven levels; recursion below stays far from Python's limit
_MAX_DUPLICATES_TOLD = 20


def read_json_object(path: Path) -> dict[str, Json]:
    """Comments (keys that begin with `_`) are left out at every depth, and so is `$schema`, which is for editors."""
    text = _read_text(path)
    tree = _parse(text, path)
    if is_too_deep(tree):
        raise _too_deep(path)
    if not isinstance(tree, dict):
        raise ManifestError(f"{path}: a manifest is a JSON object {{...}}, this file holds {_kind(tree)}")
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
        raise ManifestError(f"{shorten(str(path))}: cannot be read: {error.strerror}") from None


def _read_bytes(path: Path) -> bytes:
    """Of a regular file only: a device has no end, and a pipe may have no beginning."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ManifestError(f"{path} is a directory", hint=f"name the file in it: {path / 'manifest.json'}")
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"{path} is not a file", hint="a manifest is read from a regular file, not from a pipe")
    with path.open("rb") as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"{path} has {status.st_size / MIB:.0f} MiB; a manifest has at most {MAX_MANIFEST_BYTES // MIB} MiB",
            hint="this looks like data, not like a manifest: name it in training.dataset.path",
        )
    return content


def shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _parse(text: str, path: Path) -> Json:
    if not text.strip():
        raise ManifestError(f"{path} is empty", hint="copy experts/neo4j/manifest.json and change it")
    duplicates: list[str] = []

    def object_without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            duplicates.extend(sorted(key for key, count in counts.items() if count > 1 and not key.startswith("_")))
        return tree

    def refuse_constant(name: str) -> NoReturn:
        raise ManifestError(f"{path}: {name} is not JSON", hint="write a number, or leave the key out")

    try:
        tree: Json = json.loads(text, object_pairs_hook=object_without_duplicates, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        snippet = text.splitlines()[error.lineno - 1].strip()[:80] if text.splitlines()[error.lineno - 1 :] else ""
        raise ManifestError(
            f"{path}, line {error.lineno}, column {error.colno}: broken JSON: {error.msg}",
            (Problem(where="", what=snippet),) if snippet else (),
        ) from None
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise ManifestError(f"{path}: a number is out of range: {error}") from None
    if duplicates:
        problems = tuple(
            Problem(where=_line_of_second(text, key), what=f"the key {shorten(key)!r} stands twice in one object")
            for key in duplicates[:_MAX_DUPLICATES_TOLD]
        )
        if len(duplicates) > len(problems):
            problems += (Problem(where="", what=f"and {len(duplicates) - len(problems):,} more"),)
        raise ManifestError(f"{path}: duplicate keys", problems, hint="JSON keeps only the last one: delete the other")
    return tree


def _line_of_second(text: str, key: str) -> str:
    """Where the key is written again: the second line that defines it, which is a help for people, not a proof."""
    lines = [
        number for number, line in enumerate(text.splitlines(), 1) if f"{json.dumps(key)}:" in line.replace(" :", ":")
    ]
    return f"line {lines[1]}" if len(lines) > 1 else ""


def is_too_deep(tree: Json) -> bool:
    """Level by level, without recursion, which is what a deep tree would break."""
    level: list[Json] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level if isinstance(node, dict | list) for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: dict[str, Json] | list[Json]) -> Iterator[Json]:
    yield from node.values() if isinstance(node, dict) else node


def _too_deep(path: Path) -> ManifestError:
    return ManifestError(f"{path}: nested too deeply to be a manifest (more than {MAX_DEPTH} levels)")


def _without_comments(node: Json) -> Json:
    if isinstance(node, dict):
        return {key: _without_comments(value) for key, value in node.items() if not key.startswith("_")}
    if isinstance(node, list):
        return [_without_comments(item) for item in node]
    return node


def walk_keys(node: Json, path: str = "") -> Iterator[str]:
    """Every key of a tree as a dotted path, list positions in brackets."""
    if isinstance(node, dict):
        for key, value in node.items():
            here = f"{path}.{key}" if path else key
            yield here
            yield from walk_keys(value, here)
    elif isinstance(node, list):
        for position, item in enumerate(node):
            yield from walk_keys(item, f"{path}[{position}]")


def _kind(node: Json) -> str:
    if isinstance(node, list):
        return "a list"
    return "a string" if isinstance(node, str) else json.dumps(node)
