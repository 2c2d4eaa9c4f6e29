"""Parser of `--vary KEY=A,B`: the key, its values, and the overrides they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.core.errors import InputError
from launcher.manifest.config import TrainingConfig
from launcher.manifest.model import Manifest
from launcher.manifest.overrides import parse_value
from launcher.manifest.parse_json import shorten
from launcher.manifest.problems import SYNONYMS
from launcher.manifest.suggest import find_closest

_PREFIX = "training.config."
_EXAMPLE = "--vary torch_compile=true,false"
_MAX_VALUES = 6  # more variants take too long to measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """A key and its values, one per variant; the others are compared with the first."""

    key: str  # as given
    path: str  # as --set takes it
    values: tuple[str, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        """One `--set` override per variant."""
        return tuple(f"{self.path}={value}" for value in self.values)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the variants."""
        return tuple(f"{self.key}={value}" for value in self.values)


def parse_vary(text: str) -> Variation:
    """Parse the value of `--vary`; raises InputError."""
    key, equals, rest = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--vary {shorten(text)}: not KEY=A,B", hint=_EXAMPLE)
    values = tuple(value.strip() for value in _split(rest))
    _check_values(text, key, values)
    return Variation(key=key, path=_resolve_path(key), values=values)


def _check_values(text: str, key: str, values: tuple[str, ...]) -> None:
    if not all(values):
        raise InputError(f"--vary {shorten(text)}: a value is empty", hint=_EXAMPLE)
    if len(values) < 2:
        raise InputError(
            f"--vary {shorten(text)}: only one value", hint=f"give two or more: --vary {key}={values[0]},OTHER"
        )
    if len(values) > _MAX_VALUES:
        raise InputError(f"--vary {shorten(text)}: {len(values)} values, at most {_MAX_VALUES} are allowed")
    by_meaning: dict[str, str] = {}
    for value in values:
        meaning = json.dumps(parse_value(value), sort_keys=True)
        if meaning in by_meaning:
            raise InputError(
                f"--vary {shorten(text)}: {by_meaning[meaning]} and {value} are the same value",
                hint="a comparison needs values that differ",
            )
        by_meaning[meaning] = value


def _split(text: str) -> Iterator[str]:
    """Split at commas outside lists, objects and quotes: target_modules=["q_proj","v_proj"],["q_proj"]."""
    depth, is_quoted, begin = 0, False, 0
    for index, char in enumerate(text):
        if char == '"' and text[index - 1 : index] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted and char in "[{":
            depth += 1
        elif not is_quoted and char in "]}":
            depth -= 1
        elif char == "," and depth == 0 and not is_quoted:
            yield text[begin:index]
            begin = index + 1
    yield text[begin:]


def _resolve_path(key: str) -> str:
    """Expand the short name of a key of training.config; paths stay as they are and are checked with the manifest."""
    fields = TrainingConfig.model_fields
    if key in fields:
        return f"{_PREFIX}{key}"
    if "." in key or "[" in key or key in Manifest.model_fields:
        return key
    suggestion = SYNONYMS.get(key) or find_closest(key, fields)
    raise InputError(
        f"--vary {shorten(key)}: no key of training.config",
        hint=f"did you mean {suggestion}?" if suggestion else "use a path for other keys: base_models.0.quantization",
    )
