"""The search space of a sweep, from flags such as `--param learning_rate=1e-5..1e-3:log` and `--param rank=8,16,32`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from launcher.core.errors import InputError, ManifestError
from launcher.manifest import Manifest, load_manifest
from launcher.manifest.config import TrainingConfig
from launcher.manifest.ignored_keys import find_ignored_keys
from launcher.manifest.overrides import list_overridden_keys, parse_value
from launcher.manifest.parse_json import Json, shorten
from launcher.manifest.problems import find_key

_CONFIG = "training.config."
_NUMBER = r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)"
_OTHER_RANGE = re.compile(rf"{_NUMBER} ?(?:-|:|to) ?{_NUMBER}", re.IGNORECASE)
_HINT = "write --param learning_rate=1e-5..1e-3:log, --param dropout=0..0.2 or --param rank=8,16,32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """One parameter: a list of values, or a range with both ends included."""

    key: str  # dotted, as for --set
    choices: tuple[str, ...] = ()  # as JSON; empty: a range
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_integer: bool = False

    @property
    def name(self) -> str:
        """Return the manifest key without the prefix `training.config.`."""
        return self.key.removeprefix(_CONFIG)

    @property
    def ends(self) -> tuple[str, ...]:
        """Return values to check against the manifest: all choices, or both ends of the range."""
        return self.choices or (self.format(self.low), self.format(self.high))

    def format(self, value: float | str) -> str:
        """Return a value as the text of --set KEY=VALUE."""
        if isinstance(value, str):
            return value
        return str(int(value)) if self.is_integer else repr(float(value))

    def describe(self) -> str:
        """Return a text that lists the choices, or describes the range."""
        if self.choices:
            return ", ".join(self.choices)
        kind = "integers" if self.is_integer else "real numbers"
        return f"{self.format(self.low)} to {self.format(self.high)}, {kind}{', logarithmic' if self.is_log else ''}"


def parse_params(texts: Sequence[str], manifest: Path, overrides: Sequence[str]) -> tuple[Param, ...]:
    """Parse --param flags, and check every parameter against the manifest with the overrides of --set."""
    if not texts:
        raise InputError("no parameter to search: --param is missing", hint=_HINT)
    params = [_parse_param(text) for text in texts]
    keys = [param.key for param in params]
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(
                f"--param {key.removeprefix(_CONFIG)}: given twice", hint="give all its values in one flag"
            )
    both = sorted(set(keys) & list_overridden_keys(overrides))
    if both:
        raise InputError(f"{both[0]} is searched by --param, but fixed by --set", hint="remove one of the two")
    for param in params:
        for value in param.ends:
            _check_value(param, value, manifest, overrides)
    return tuple(params)


def list_grid(params: Sequence[Param], limit: int) -> list[dict[str, str]] | None:
    """Return all combinations, as values by key; None if a parameter is a range, or if there are more than `limit`."""
    if not all(param.choices for param in params) or math.prod(len(param.choices) for param in params) > limit:
        return None
    return [
        dict(zip([param.key for param in params], values, strict=True))
        for values in product(*(param.choices for param in params))
    ]


def _parse_param(text: str) -> Param:
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not name or not values:
        raise InputError(f"--param {shorten(text)}: not NAME=VALUES", hint=_HINT)
    key = _resolve_key(name)
    if ".." in values and not values.startswith(("[", '"')):
        return _parse_range(key, name, values)
    choices = [json.dumps(value) for value in _split_values(values)]
    if len(set(choices)) < len(choices):
        raise InputError(f"--param {shorten(text)}: a value is given twice", hint="name each value once")
    if len(choices) < 2:
        hint = f"use --set {key}={values} for a fixed value, or name more values: {name}={values},..."
        if (ends := _OTHER_RANGE.fullmatch(values)) is not None:
            hint = f"write a range with two dots: --param {name}={ends[1]}..{ends[2]}"
        raise InputError(f"--param {shorten(text)}: only one value", hint=hint)
    return Param(key=key, choices=tuple(choices))


def _split_values(text: str) -> list[Json]:
    """Split a list of values at commas, but not at those within JSON strings and lists."""
    values = parse_value(f"[{text}]")
    return values if isinstance(values, list) else [parse_value(part.strip()) for part in text.split(",")]


def _parse_range(key: str, name: str, text: str) -> Param:
    where = f"--param {shorten(f'{name}={text}')}"
    ends, _, scale = text.partition(":")
    if scale not in ("", "log") or text.endswith(":"):
        raise InputError(f"{where}: unknown scale {scale!r}", hint="only :log may follow a range")
    first, _, last = ends.partition("..")
    try:
        low, high = float(first), float(last)
    except ValueError:
        raise InputError(f"{where}: the ends of a range must be numbers", hint=_HINT) from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError(f"{where}: the ends of a range must be finite numbers", hint=_HINT)
    kinds = _find_types(key)
    if kinds and not kinds & {int, float}:
        raise InputError(f"{where}: this key is not numeric", hint=f"name its values: {name}=A,B")
    is_integer = int in kinds if kinds and float not in kinds else float not in kinds and _is_integer(first, last)
    if is_integer and not (low.is_integer() and high.is_integer()):
        raise InputError(f"{where}: this key needs whole numbers", hint=f"{name}={math.ceil(low)}..{math.floor(high)}")
    if low >= high:
        what = "both ends are equal" if low == high else "the first end is larger than the last"
        raise InputError(f"{where}: {what}", hint=f"--set {key}={first} fixes a value" if low == high else _HINT)
    if scale == "log" and low <= 0:
        raise InputError(f"{where}: a logarithmic range must begin above 0", hint="omit :log, or begin above 0")
    return Param(key=key, low=low, high=high, is_log=scale == "log", is_integer=is_integer)


def _is_integer(*texts: str) -> bool:
    return all(text.strip().lstrip("+-").isdigit() for text in texts)


def _resolve_key(name: str) -> str:
    """Return the dotted manifest key of a name; a short name is a key of training.config."""
    key = f"{_CONFIG}{name}" if name in TrainingConfig.model_fields else name
    if not _find_types(key):
        meant = find_key(name.rpartition(".")[2], Manifest)
        hint = f"did you mean {meant.removeprefix(_CONFIG)}?" if meant else "`launcher schema` lists the keys"
        raise InputError(f"--param {shorten(name)}: unknown key", hint=hint)
    for item in find_ignored_keys([key]):
        raise InputError(f"--param {name}: training does not use this key: {item.reason}")
    return key


def _find_types(key: str) -> set[Any]:
    """Return the types that a key of the manifest can have; empty if there is no such key."""
    types: set[Any] = {Manifest}
    for part in key.split("."):
        models = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
        if part.isdigit() and models:
            continue  # an entry of a list
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        types = {leaf for field in fields for leaf in _iterate_types(field.annotation)}
    return types


def _iterate_types(annotation: Any) -> Iterator[Any]:
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _iterate_types(argument)


def _check_value(param: Param, value: str, manifest: Path, overrides: Sequence[str]) -> None:
    """Refuse a value that the manifest does not allow for its key; combinations are checked by each trial's plan."""
    try:
        load_manifest(manifest, [*overrides, f"{param.key}={value}"])
    except ManifestError as error:
        for problem in error.problems:
            if problem.where == param.key:
                raise InputError(f"--param {param.name}: {value}: {problem.what}") from None
