"""Overrides such as `--set training.config.learning_rate=1e-4`, applied before validation."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterable, Iterator

from launcher.core.errors import InputError, Problem
from launcher.core.frozen_model import flatten
from launcher.manifest.config import TrainingConfig
from launcher.manifest.parse_json import Json, is_too_deep, shorten
from launcher.manifest.upgrade import is_schema_1

_PATH = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[[0-9]{1,9}\])*")
_PART = re.compile(r"[^.\[\]]+")
_HINT = "--set training.config.learning_rate=1e-4"
_CONFIG = "training.config."


def apply_overrides(tree: dict[str, Json], overrides: Iterable[str]) -> dict[str, Json]:
    """Return a copy of the tree with all overrides applied; raises InputError."""
    tree = copy.deepcopy(tree)
    for override in overrides:
        parts, value = _parse(override)
        _assign(tree, _convert_to_form_of(tree, parts), value)
        if is_too_deep(tree):
            raise InputError(f"--set {shorten(override)}: the value is nested too deeply")
    return tree


def list_overridden_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Return the dotted keys (schema 2.0) that overrides set; for a value that is an object, all keys in it."""
    keys: set[str] = set()
    for parts, value in map(_parse, overrides):
        keys.update(flatten(value, ".".join(_convert_to_schema_2(parts))))
    return frozenset(keys)


def suggest_list(overrides: Iterable[str], problems: Iterable[Problem]) -> str:
    """Return how to write the first override that is a text but must be a list; empty if there is none."""
    wrong = {problem.where for problem in problems if " a list" in problem.what}
    for parts, value in map(_parse, overrides):
        key = ".".join(parts)
        if isinstance(value, str) and key in wrong:
            words = [word for word in re.split(r"[\s,\[\]\"']+", value) if word and word != "none"]
            return f"write the list as JSON: --set {shlex.quote(f'{key}={json.dumps(words, ensure_ascii=False)}')}"
    return ""


def check_effects(config: TrainingConfig, overridden_keys: frozenset[str]) -> None:
    """Raise InputError if another key makes an override of training.config ineffective; in a manifest it may be."""
    for name, reason, hint in _list_shadowed(config, overridden_keys):
        if f"{_CONFIG}{name}" in overridden_keys and getattr(config, name) is not None:
            raise InputError(f"--set {_CONFIG}{name} has no effect: {reason}", hint=hint)


def _list_shadowed(config: TrainingConfig, overridden_keys: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    """Yield keys that have no effect in this config, with the reason and what to set instead."""
    for what, name in (("save", "save_strategy"), ("eval", "evaluation_strategy")):
        strategy = getattr(config, name)
        if strategy in ("epoch", "no"):
            yield f"{what}_steps", f"{name} is {strategy}", _make_cadence_hint(config, name)
    if config.lr_scheduler == "constant":
        hint = f"--set {_CONFIG}lr_scheduler=constant_with_warmup"
        for name in ("warmup_steps", "warmup_ratio"):
            if getattr(config, name):
                yield name, "lr_scheduler constant has no warm-up", hint
    elif config.warmup_ratio is not None:
        reason = f"warmup_ratio {config.warmup_ratio:g} takes precedence"
        yield "warmup_steps", reason, f"--set {_CONFIG}warmup_ratio=null"
    if config.max_steps and f"{_CONFIG}max_steps" not in overridden_keys:
        for name in ("epochs", "num_epochs"):
            yield name, f"max_steps {config.max_steps} takes precedence", f"--set {_CONFIG}max_steps=0"
    if config.precision is not None:
        for name in ("bf16", "fp16"):
            yield (
                name,
                f"precision {config.precision} takes precedence",
                "leave it out, or change the precision with --precision",
            )
    if config.early_stopping_patience is None:
        hint = f"--set {_CONFIG}early_stopping_patience=3"
        yield "early_stopping_threshold", "early_stopping_patience is absent", hint
    if config.optim == "sgd":
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            yield name, "optim sgd is not AdamW", f"--set {_CONFIG}optim=adamw_torch"


def _make_cadence_hint(config: TrainingConfig, name: str) -> str:
    """Return how to save or evaluate every N steps; to load the best checkpoint, both strategies must be equal."""
    names = ("save_strategy", "evaluation_strategy") if config.load_best_model_at_end else (name,)
    needed = [each for each in names if getattr(config, each) not in (None, "steps")]
    return "add " + " ".join(f"--set {_CONFIG}{each}=steps" for each in needed)


def remove_nulls(tree: dict[str, Json], overrides: Iterable[str]) -> dict[str, Json]:
    """Return a copy of the tree (schema 2.0) without the keys that overrides set to null."""
    tree = copy.deepcopy(tree)
    for parts, value in map(_parse, overrides):
        *above, key = _convert_to_schema_2(parts)
        node: Json = tree
        for part in above:
            if isinstance(node, list):
                node = node[int(part)] if part.isdigit() and int(part) < len(node) else None
            else:
                node = node.get(part) if isinstance(node, dict) else None
        if value is None and isinstance(node, dict) and key in node and node[key] is None:
            del node[key]
    return tree


def _parse(override: str) -> tuple[list[str], Json]:
    """Return the path and the value of KEY=VALUE; raises InputError."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise InputError(f"--set {shorten(override)}: not KEY=VALUE", hint=_HINT)
    if not _PATH.fullmatch(path):
        raise InputError(f"--set {shorten(path)}: not a path of keys separated by dots", hint=_HINT)
    return _PART.findall(path), parse_value(text)


def parse_value(text: str) -> Json:
    """Parse the text as JSON (numbers, true, null, lists, ...), or return it as a string."""
    try:
        value: Json = json.loads(text, parse_constant=lambda name: name)
    except ValueError:
        return text
    except RecursionError:
        raise InputError(f"--set ...={shorten(text)}: the value is nested too deeply") from None
    return value


def _convert_to_form_of(tree: dict[str, Json], parts: list[str]) -> list[str]:
    """Convert a path to the schema version of the file: for a 1.0 manifest, --set accepts 1.0 and 2.0 paths."""
    if parts[0] == "base_model" and not is_schema_1(tree):
        raise InputError(
            f"--set {_format(parts)}: the manifest has a list of base_models",
            hint=f"write {_format(_convert_to_schema_2(parts))}",
        )
    if parts[:2] != ["base_models", "0"] or "base_model" not in tree:
        return parts
    return parts[2:] if parts[2:3] == ["adapters"] else ["base_model", *parts[2:]]


def _convert_to_schema_2(parts: list[str]) -> list[str]:
    if parts[0] == "base_model":
        return ["base_models", "0", *parts[1:]]
    return ["base_models", "0", *parts] if parts[0] == "adapters" else parts


def _assign(tree: dict[str, Json], parts: list[str], value: Json) -> None:
    node: Json = tree
    for depth, part in enumerate(parts):
        is_last = depth == len(parts) - 1
        if isinstance(node, dict):
            if is_last:
                node[part] = value
                return
            node = node.setdefault(part, {})
        elif isinstance(node, list):
            position = _parse_position(parts, depth, len(node))
            if is_last:
                node[position] = value
                return
            node = node[position]
        else:
            raise InputError(
                f"--set {_format(parts)}: {_format(parts[:depth])} has no keys, because its value is not an object"
            )


def _parse_position(parts: list[str], depth: int, num_entries: int) -> int:
    part, parent = parts[depth], _format(parts[:depth])
    if not re.fullmatch("[0-9]{1,9}", part):
        is_number = re.fullmatch("-?[0-9]+", part) is not None
        corrected = _format([*parts[:depth], "0", *parts[depth + is_number :]])
        raise InputError(f"--set {_format(parts)}: {parent} is a list", hint=f"write {corrected}")
    if int(part) >= num_entries:
        raise InputError(f"--set {_format(parts)}: the list {parent} has {num_entries} entries; count from 0")
    return int(part)


def _format(parts: list[str]) -> str:
    return shorten(".".join(parts), 100)
