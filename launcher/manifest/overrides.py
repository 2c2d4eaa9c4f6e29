"""`--set training.config.learning_rate=1e-4`: put into the tree before it is checked."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable

from launcher.errors import InputError
from launcher.manifest.reading import Json

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def apply_overrides(tree: dict[str, Json], overrides: Iterable[str]) -> dict[str, Json]:
    tree = copy.deepcopy(tree)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise InputError(f"--set {override}: not KEY=VALUE", hint="--set training.config.learning_rate=1e-4")
        _assign(tree, path.strip(), parse_value(text))
    return tree


def parse_value(text: str) -> Json:
    """JSON where it is JSON (numbers, true, null, lists), otherwise the text itself."""
    try:
        value: Json = json.loads(text, parse_constant=lambda name: name)
    except ValueError:
        return text
    return value


def _assign(tree: dict[str, Json], path: str, value: Json) -> None:
    steps = [name or int(index) for name, index in _STEP.findall(path)]
    node: Json = tree
    for depth, step in enumerate(steps):
        is_last = depth == len(steps) - 1
        here = ".".join(map(str, steps[: depth + 1]))
        if isinstance(node, dict) and isinstance(step, str):
            if is_last:
                node[step] = value
                return
            node = node.setdefault(step, {})
        elif isinstance(node, list):
            position = _position(step, node, here)
            if is_last:
                node[position] = value
                return
            node = node[position]
        else:
            raise InputError(f"--set {path}: {here} is inside a value that has no keys")


def _position(step: str | int, items: list[Json], here: str) -> int:
    if not str(step).isdigit() or int(step) >= len(items):
        raise InputError(f"--set {here}: the list has {len(items)} entries; count from 0")
    return int(step)
