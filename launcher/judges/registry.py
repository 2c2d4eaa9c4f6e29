"""Registry of judges: built-in ones by language, or a class or command named in the manifest."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Mapping
from types import MappingProxyType

from launcher.core.errors import InputError
from launcher.judges.base import CORRECT_CHECK, Judge
from launcher.manifest import Manifest
from launcher.manifest.suggest import find_closest
from launcher.manifest.trust import check_trust, list_judge_code

# Language -> class of its judge. Imported on demand, because each needs optional packages.
_BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "json": "launcher.judges.json_value.judge:JsonJudge",
        "sql": "launcher.judges.sql.judge:SqlJudge",
        "cypher": "launcher.judges.cypher.judge:CypherJudge",
        "typescript": "launcher.judges.typescript.judge:TypescriptJudge",
        "exact_match": "launcher.judges.exact_match:ExactMatchJudge",
    }
)
# Language -> names of its judge's checks, for plans: opening a judge needs its packages.
_CHECK_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "json": ("parses", "schema", "kept", "equal"),
        "sql": ("parses", "executes", "result"),
        "cypher": ("parses", "reads", "names", "directions", "result", "matches", "equal"),
        "typescript": ("parses", "types", "behaves", "equal"),
        "exact_match": ("matches", "equal"),
    }
)
_LANGUAGE_OF_EXPERT: Mapping[str, str] = MappingProxyType({"neo4j": "cypher"})
JUDGED_NAMES = frozenset({*_BUILT_IN, *_LANGUAGE_OF_EXPERT})  # experts with these names have a judge by default


def resolve_judge_name(manifest: Manifest) -> str | None:
    """Return the judge's name: evaluation.judge, else a language in the name of the grammar or expert, else None."""
    if manifest.evaluation is not None and manifest.evaluation.judge is not None:
        _check_name(manifest.evaluation.judge)
        return manifest.evaluation.judge
    decoding = manifest.training.decoding
    grammar = (decoding.grammar_type if decoding is not None else None) or ""
    for word in (*re.split(r"[^a-z]+", grammar.lower()), manifest.expert):  # sql-postgres, json.gbnf
        language = _LANGUAGE_OF_EXPERT.get(word, word)
        if language in _BUILT_IN:
            return language
    return None


def _check_name(name: str) -> None:
    if name not in _BUILT_IN and ":" not in name:
        closest = find_closest(name, (*_BUILT_IN, *_LANGUAGE_OF_EXPERT))
        raise InputError(
            f"evaluation.judge: {name!r} is neither one of {', '.join(_BUILT_IN)} nor package.module:Class",
            hint=f"did you mean {_LANGUAGE_OF_EXPERT.get(closest, closest)}?" if closest else "",
        )


def list_check_names(manifest: Manifest) -> tuple[str, ...] | None:
    """Return the check names of an expert's judge; empty without a judge, None (unknown) for a user's class."""
    if manifest.evaluation is not None and manifest.evaluation.judge_command:
        return (CORRECT_CHECK,)
    name = resolve_judge_name(manifest)
    return () if name is None else _CHECK_NAMES.get(name)


def describe_missing_judge(manifest: Manifest) -> str:
    """Return a note if the program of judge_command is not installed here; empty if it is or no command is set."""
    command = manifest.evaluation.judge_command if manifest.evaluation is not None else ()
    if not command or shutil.which(command[0]) is not None:
        return ""
    return f"evaluation.judge_command: {command[0]!r} does not exist on this machine: no answer can be judged here"


def open_judge(manifest: Manifest) -> Judge:
    """Open the judge of an expert; raises InputError if it has none, or one whose code is not trusted."""
    if manifest.evaluation is not None and manifest.evaluation.judge_command:
        from launcher.judges.external_command import CommandJudge

        check_trust(list_judge_code(manifest))
        return CommandJudge(manifest.evaluation.judge_command)
    name = resolve_judge_name(manifest)
    if name is None:
        raise InputError(
            f"{manifest.name}: no judge for this expert's answers",
            hint='add "evaluation": {"judge": "exact_match"} to the manifest to compare texts; evaluation.judge may '
            f"also be {', '.join(_BUILT_IN)} or package.module:Class, and evaluation.judge_command a program that "
            "reads and writes one JSON object per line",
        )
    return open_judge_by_name(name)


def open_judge_by_name(name: str) -> Judge:
    """Open a judge by its language, or by package.module:Class."""
    if name in _BUILT_IN:
        module, _, class_name = _BUILT_IN[name].partition(":")
        judge: Judge = getattr(importlib.import_module(module), class_name)()
        return judge
    _check_name(name)
    from launcher.judges.module_judge import ModuleJudge

    check_trust((f"evaluation.judge: {name}",))
    return ModuleJudge(name)
