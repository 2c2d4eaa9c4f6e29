"""`--vary KEY=A,B`: which key, which values, and the overrides that they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.errors import InputError
from launcher.manifest.config import TrainingConfig
from launcher.manifest.keys import SYNONYMS
from launcher.manifest.model import Manifest
from launcher.manifest.overrides import parse_value
from launcher.manifest.reading import shorten
from launcher.manifest.spelling import closest

_PREFIX = "training.config."
_EXAMPLE = "--vary torch_compile=true,false"
_MOST_VALUES = 6  # more sides than these take longer than anybody waits
_OPENING, _CLOSING = "[{", "]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """One key and the values that it takes, one a side; the first is what the others are compared with."""

    key: str  # as it was given
    path: str  # as --set takes it
    values: tuple[str, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(f"{self.path}={value}" for value in self.values)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"{self.key}={value}" for value in self.values)


def parse_vary(text: str) -> Variation:
    key, equals, rest = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--vary {shorten(text)}: not KEY=A,B", hint=_EXAMPLE)
    values = tuple(value.strip() for value in _split(rest))
    _check_values(text, key, values)
    return Variation(key=key, path=_find_path(key), values=values)


def _check_values(text: str, key: str, values: tuple[str, ...]) -> None:
    if not all(values):
        raise InputError(f"--vary {shorten(text)}: a value is empty", hint=_EXAMPLE)
    if len(values) < 2:
        raise InputError(
            f"--vary {shorten(text)}: one value has nothing to be compared with",
            hint=f"give two: --vary {key}={values[0]},OTHER",
        )
    if len(values) > _MOST_VALUES:
        raise InputError(f"--vary {shorten(text)}: {len(values)} values are too many, at most {_MOST_VALUES}")
    seen: dict[str, str] = {}
    for value in values:
        meant = json.dumps(parse_value(value), sort_keys=True)
        if meant in seen:
            raise InputError(
                f"--vary {shorten(text)}: {seen[meant]} and {value} are the same value",
                hint="a comparison needs two that differ",
            )
        seen[meant] = value


def _split(text: str) -> Iterator[str]:
    """At commas that stand in no list, no object and no quotes: target_modules=["q_proj","v_proj"],["q_proj"]."""
    depth, is_quoted, begin = 0, False, 0
    for place, char in enumerate(text):
        if char == '"' and text[place - 1 : place] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted and char in _OPENING:
            depth += 1
        elif not is_quoted and char in _CLOSING:
            depth -= 1
        elif char == "," and depth == 0 and not is_quoted:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def _find_path(key: str) -> str:
    """A short name is a key of training.config; a path is taken as it is, and the manifest's reader knows its keys."""
    fields = TrainingConfig.model_fields
    if key in fields:
        return f"{_PREFIX}{key}"
    if "." in key or "[" in key or key in Manifest.model_fields:
        return key
    meant = SYNONYMS.get(key) or closest(key, fields)
    raise InputError(
        f"--vary {shorten(key)}: no key of training.config",
        hint=f"did you mean {meant}?" if meant else "a key elsewhere is given by its path: base_models.0.quantization",
    )
