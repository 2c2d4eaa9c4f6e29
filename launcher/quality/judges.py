"""Which judge an expert has: one of ours by its language, or its own, named in the manifest."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from launcher.errors import InputError
from launcher.manifest import Manifest
from launcher.quality.judging import Judge

# Language -> where its judge lives. They are imported when they are needed: each brings packages of its own.
_OURS: Mapping[str, str] = MappingProxyType(
    {
        "json": "launcher.quality.json_answers:JsonJudge",
        "sql": "launcher.quality.sql:SqlJudge",
        "cypher": "launcher.quality.cypher:CypherJudge",
        "typescript": "launcher.quality.typescript:TypescriptJudge",
    }
)
_RESERVED = "loss"  # in metrics: eval/loss
_LANGUAGE_OF_EXPERT: Mapping[str, str] = MappingProxyType({"neo4j": "cypher"})
LANGUAGE_NAMES = frozenset({*_OURS, *_LANGUAGE_OF_EXPERT})  # experts of these names are judged, where nothing is said


def name_judge(manifest: Manifest) -> str | None:
    """By the manifest's word, by the grammar of its decoding, by the expert's name; None: nobody can judge it."""
    if manifest.evaluation is not None and manifest.evaluation.judge is not None:
        return manifest.evaluation.judge
    decoding = manifest.training.decoding
    grammar = (decoding.grammar_type if decoding is not None else None) or ""
    for word in (*re.split(r"[^a-z]+", grammar.lower()), manifest.expert):  # sql-postgres, json.gbnf
        language = _LANGUAGE_OF_EXPERT.get(word, word)
        if language in _OURS:
            return language
    return None


def open_judge(manifest: Manifest) -> Judge:
    """Raises where there is none, with the way to name one."""
    if manifest.evaluation is not None and manifest.evaluation.judge_command:
        from launcher.quality.command import CommandJudge

        return CommandJudge(manifest.evaluation.judge_command)
    name = name_judge(manifest)
    if name is None:
        raise InputError(
            f"{manifest.name}: nobody here can judge its answers",
            hint=f"evaluation.judge names one: {', '.join(_OURS)}, or package.module:Class; evaluation.judge_command "
            "a program that reads a JSON object a line and writes one",
        )
    return open_named_judge(name)


def open_named_judge(name: str) -> Judge:
    """One of ours by its language, or package.module:Class."""
    return _load(_OURS.get(name, name))


def _load(place: str) -> Judge:
    module_name, colon, class_name = place.partition(":")
    if not colon:
        raise InputError(f"evaluation.judge: {place!r} is neither one of {', '.join(_OURS)} nor package.module:Class")
    try:
        made: Any = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        if place in _OURS.values():
            raise
        raise InputError(f"evaluation.judge: {place} cannot be loaded: {error}") from None
    for name in ("checks", "main_check", "judge", "close"):
        if not hasattr(made, name):
            raise InputError(f"evaluation.judge: {place} is no judge: it has no {name}")
    judge: Judge = made
    if any(check.name == _RESERVED for check in judge.checks):
        raise InputError(f"evaluation.judge: {place} has a check called {_RESERVED}, which is the held-out loss's name")
    return judge
