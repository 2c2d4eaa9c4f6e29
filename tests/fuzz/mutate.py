"""Seeded mutations of files: bytes, JSON trees, and things that are not files."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ABSURD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\ud800", "\x1b[31m", [], {}, [[]], {"a": 1}, -1, 0, 1, 2, 0.5, -0.0),
    *(2**31, 2**53, 2**63, 2**64, 10**15, 10**30, 10**400, -(10**18), 1e-300, 1e300, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), "NaN", "1e999", "9" * 5000, "0", "../..", "/dev/zero", "a\0b"),
    *("2026-11-15T10:00:00+00:00", "9999-12-31T23:59:59", "0001-01-01T00:00:00+14:00", "a" * 100_000),
)
DEEP = 200_000


def mutate_text(text: str, rng: random.Random) -> bytes:
    """Return a damaged form of a JSON or JSON Lines file."""
    kind = rng.choice(("tree", "tree", "tree", "tree", "bytes", "cut", "deep", "constant", "huge", "repeat"))
    if kind == "tree":
        return mutate_json(text, rng)
    data = bytearray(text.encode())
    if kind == "bytes":
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "deep":
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
        return (opening * DEEP + ("1" + closing * DEEP if rng.random() < 0.5 else "") + "\n").encode()
    elif kind == "constant":
        return rng.choice(("", "\n", "null", "[]", "{}", "1", '"x"', "\ufeff{}", "\x00" * 64, "NaN")).encode() + b"\n"
    elif kind == "huge":
        return b" " * (18 << 20) + bytes(data)
    else:
        data *= rng.randint(2, 3)
    return bytes(data)


def mutate_json(text: str, rng: random.Random) -> bytes:
    """Change, delete or add values of a JSON tree, or of one line of JSON Lines."""
    lines = text.splitlines()
    try:
        tree = json.loads(text)
    except ValueError:
        index = rng.randrange(len(lines))
        tree = json.loads(lines[index])
        lines[index] = json.dumps(_change(tree, rng))
        return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    return (json.dumps(_change(tree, rng), indent=rng.choice((None, 2))) + "\n").encode("utf-8", "surrogatepass")


def _change(tree: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        places = list(_list_places(tree))
        if not places:
            return _pick(ABSURD, rng)
        box, key = rng.choice(places)
        action = rng.random()
        if action < 0.7:
            box[key] = _absurd_like(box[key], rng) if rng.random() < 0.6 else _pick(ABSURD, rng)
        elif action < 0.85:
            del box[key]
        elif isinstance(box, dict):
            box[rng.choice(("extra", "", "__class__", "\ud800"))] = _pick(ABSURD, rng)
        else:
            box.insert(key, _pick(ABSURD, rng))
    return tree


def _absurd_like(value: Any, rng: random.Random) -> Any:
    """Return an extreme value of the same type, which gets past a check of types."""
    alike = [one for one in ABSURD if type(one) is type(value)]
    return _pick(alike or ABSURD, rng)


def _pick(values: Sequence[Any], rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(values))  # later changes must not reach the table


def _list_places(tree: Any) -> Any:
    stack = [tree]
    while stack:
        box = stack.pop()
        for key in list(box) if isinstance(box, dict) else range(len(box)) if isinstance(box, list) else ():
            yield box, key
            if isinstance(box[key], dict | list):
                stack.append(box[key])


KINDS = ("fifo", "zero", "tty", "folder", "loop", "dangling", "missing", "closed", "empty", "sparse")


def replace_file(path: Path, rng: random.Random, *, has_limit: bool = True) -> None:
    """Put something in place of a file: a pipe, a device, a folder, a link, nothing, or gigabytes if it has a limit."""
    remove(path)
    kind = rng.choice(KINDS if has_limit else KINDS[:-1])
    if kind == "fifo":
        os.mkfifo(path)
    elif kind in ("zero", "tty"):
        path.symlink_to("/dev/zero" if kind == "zero" else "/dev/tty")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(6 << 30)
    elif kind == "closed":
        path.touch(mode=0)
    elif kind == "empty":
        path.touch()


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
