"""`--set training.config.learning_rate=1e-4`: put into the tree before it is checked."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator

from launcher.errors import InputError
from launcher.manifest.reading import Json, is_too_deep, shorten
from launcher.manifest.upgrade import is_schema_1

_PATH = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[[0-9]{1,9}\])*")
_STEP = re.compile(r"[^.\[\]]+")
_HINT = "--set training.config.learning_rate=1e-4"


def apply_overrides(tree: dict[str, Json], overrides: Iterable[str]) -> dict[str, Json]:
    tree = copy.deepcopy(tree)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise InputError(f"--set {shorten(override)}: not KEY=VALUE", hint=_HINT)
        steps = _parse_path(path.strip())
        _assign(tree, _steps_in(tree, steps), parse_value(text))
        if is_too_deep(tree):
            raise InputError(f"--set {shorten(override)}: nested too deeply to be a manifest")
    return tree


def find_given_keys(overrides: Iterable[str]) -> frozenset[str]:
    """The keys that overrides set, dotted, in today's form; an object that is set whole gives every key in it."""
    given: set[str] = set()
    for override in overrides:
        path, _, text = override.partition("=")
        steps = _steps_today(_parse_path(path.strip()))
        given.update(_find_leaves(".".join(steps), parse_value(text)))
    return frozenset(given)


def _find_leaves(path: str, value: Json) -> Iterator[str]:
    if not isinstance(value, dict) or not value:
        yield path
        return
    for key, below in value.items():
        yield from _find_leaves(f"{path}.{key}", below)


def parse_value(text: str) -> Json:
    """JSON where it is JSON (numbers, true, null, lists), otherwise the text itself."""
    try:
        value: Json = json.loads(text, parse_constant=lambda name: name)
    except ValueError:
        return text
    except RecursionError:
        raise InputError(f"--set ...={shorten(text)}: nested too deeply to be a manifest") from None
    return value


def _parse_path(path: str) -> list[str]:
    if not _PATH.fullmatch(path):
        raise InputError(f"--set {shorten(path)}: not a path of keys with dots between them", hint=_HINT)
    return _STEP.findall(path)


def _steps_in(tree: dict[str, Json], steps: list[str]) -> list[str]:
    """Both forms of a path mean the same in a file of schema 1.0, which has one base model and its adapters on top."""
    if steps[0] == "base_model" and not is_schema_1(tree):
        raise InputError(
            f"--set {_format(steps)}: the manifest has a list of base_models",
            hint=f"write {_format(['base_models', '0', *steps[1:]])}",
        )
    if steps[:2] != ["base_models", "0"] or "base_model" not in tree:
        return steps
    return steps[2:] if steps[2:3] == ["adapters"] else ["base_model", *steps[2:]]


def _steps_today(steps: list[str]) -> list[str]:
    """The other way round: a path into a file of schema 1.0, where it stands today."""
    if steps[0] == "base_model":
        return ["base_models", "0", *steps[1:]]
    return ["base_models", "0", *steps] if steps[0] == "adapters" else steps


def _assign(tree: dict[str, Json], steps: list[str], value: Json) -> None:
    node: Json = tree
    for depth, step in enumerate(steps):
        is_last = depth == len(steps) - 1
        if isinstance(node, dict):
            if is_last:
                node[step] = value
                return
            node = node.setdefault(step, {})
        elif isinstance(node, list):
            position = _position(steps, depth, len(node))
            if is_last:
                node[position] = value
                return
            node = node[position]
        else:
            raise InputError(
                f"--set {_format(steps)}: {_format(steps[: depth + 1])} is inside a value that has no keys"
            )


def _position(steps: list[str], depth: int, num_entries: int) -> int:
    step, above = steps[depth], _format(steps[:depth])
    if not re.fullmatch("[0-9]{1,9}", step):
        way_out = _format([*steps[:depth], "0", *steps[depth:]])
        raise InputError(f"--set {_format(steps)}: {above} is a list", hint=f"write {way_out}")
    if int(step) >= num_entries:
        raise InputError(f"--set {_format(steps)}: the list {above} has {num_entries} entries; count from 0")
    return int(step)


def _format(steps: list[str]) -> str:
    return shorten(".".join(steps), 100)
