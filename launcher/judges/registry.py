"""Registry of judges: built-in ones by language, or a class or command named in the manifest."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from launcher.core.errors import InputError
from launcher.judges.base import Judge
from launcher.manifest import Manifest

# Language -> class of its judge. Imported on demand, because each needs optional packages.
_BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "json": "launcher.judges.json_value.judge:JsonJudge",
        "sql": "launcher.judges.sql.judge:SqlJudge",
        "cypher": "launcher.judges.cypher.judge:CypherJudge",
        "typescript": "launcher.judges.typescript.judge:TypescriptJudge",
    }
)
_RESERVED = "loss"  # in metrics: eval/loss
_LANGUAGE_OF_EXPERT: Mapping[str, str] = MappingProxyType({"neo4j": "cypher"})
JUDGED_NAMES = frozenset({*_BUILT_IN, *_LANGUAGE_OF_EXPERT})  # experts with these names have a judge by default


def resolve_judge_name(manifest: Manifest) -> str | None:
    """Return the judge by the manifest's setting, its decoding grammar or the expert's name; None if there is none."""
    if manifest.evaluation is not None and manifest.evaluation.judge is not None:
        return manifest.evaluation.judge
    decoding = manifest.training.decoding
    grammar = (decoding.grammar_type if decoding is not None else None) or ""
    for word in (*re.split(r"[^a-z]+", grammar.lower()), manifest.expert):  # sql-postgres, json.gbnf
        language = _LANGUAGE_OF_EXPERT.get(word, word)
        if language in _BUILT_IN:
            return language
    return None


def open_judge(manifest: Manifest) -> Judge:
    """Open the judge of an expert; raises InputError if it has none."""
    if manifest.evaluation is not None and manifest.evaluation.judge_command:
        from launcher.judges.external_command import CommandJudge

        return CommandJudge(manifest.evaluation.judge_command)
    name = resolve_judge_name(manifest)
    if name is None:
        raise InputError(
            f"{manifest.name}: no judge for this expert's answers",
            hint=f"set evaluation.judge to {', '.join(_BUILT_IN)} or package.module:Class, or "
            "evaluation.judge_command to a program that reads and writes one JSON object per line",
        )
    return open_judge_by_name(name)


def open_judge_by_name(name: str) -> Judge:
    """Open a judge by its language, or by package.module:Class."""
    return _load(_BUILT_IN.get(name, name))


def _load(path: str) -> Judge:
    module_name, colon, class_name = path.partition(":")
    if not colon:
        known = ", ".join(_BUILT_IN)
        raise InputError(f"evaluation.judge: {path!r} is neither one of {known} nor package.module:Class")
    try:
        instance: Any = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        if path in _BUILT_IN.values():
            raise
        raise InputError(f"evaluation.judge: {path} cannot be loaded: {error}") from None
    for name in ("checks", "main_check", "judge", "close"):
        if not hasattr(instance, name):
            raise InputError(f"evaluation.judge: {path} is not a judge: it has no {name}")
    judge: Judge = instance
    if any(check.name == _RESERVED for check in judge.checks):
        raise InputError(f"evaluation.judge: {path} has a check named {_RESERVED}, the name of the validation loss")
    return judge
