"""Collect the settings of runs as readable text under dotted keys, and find those that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from launcher.analysis.compare.model import Section, Setting
from launcher.core.errors import escape
from launcher.core.frozen_model import flatten
from launcher.plan.model import Plan
from launcher.plan.resume_identity import collect_learning_settings
from launcher.runs.record import Outcome, get_global_batch

Settings = Mapping[tuple[Section, str], str]

SECTIONS: tuple[Section, ...] = ("what is learnt", "how it runs", "where it runs", "versions")
# Parts of a plan that are derived from the settings or describe them.
_DERIVED = frozenset(
    {"schema_version", "launcher_version", "manifest_sha256", "hardware", "base", "base_revision", "memory", "speed"}
    | {"oom_fallbacks", "decisions", "notes"}
)
_NOISE = frozenset(
    {"data.folder", "data.cache_dir", "data.basis", "data.is_length_assumed", "data.mean_tokens"}
    | {"batch.nearest_even_batches"}
)
_MAX_CHARS = 300


def collect_plan_settings(plan: Plan, outcome: Outcome | None) -> Settings:
    """Return all settings of a run by section: learning settings first, then execution, hardware and versions."""
    tree = plan.model_dump(mode="json")
    learnt = collect_learning_settings(plan)
    learnt |= {**_describe_adapter(plan), "batch.global_batch_size": get_global_batch(plan, outcome)}
    rest = flatten({key: value for key, value in tree.items() if key not in _DERIVED})
    machine = flatten(_describe_machine(plan), "hardware")
    settings: dict[tuple[Section, str], str] = {}
    _add(settings, "what is learnt", learnt)
    _add(settings, "how it runs", {key: value for key, value in rest.items() if key not in learnt})
    _add(settings, "where it runs", machine)
    _add(settings, "versions", {"launcher": plan.launcher_version})
    if outcome is not None:
        _add(settings, "versions", dict(outcome.versions))
        _add(settings, "versions", {"commit": outcome.git_commit})
    return settings


def _describe_adapter(plan: Plan) -> dict[str, object]:
    adapter = plan.adapter
    facts: dict[str, object] = {"adapter.trainable_parameters": adapter.trainable_parameters}
    if adapter.alpha is not None and adapter.rank is not None:
        divisor = math.sqrt(adapter.rank) if adapter.use_rslora else adapter.rank
        facts["adapter.scale"] = adapter.alpha / divisor
    return facts


def _describe_machine(plan: Plan) -> dict[str, object]:
    hardware = plan.hardware
    return {
        "gpu": None if hardware.gpu is None else hardware.gpu.title,
        "gpus_per_node": hardware.gpus_per_node,
        "nodes": hardware.nodes,
        "cpu_cores_per_node": hardware.cpu_cores_per_node,
        "price": plan.speed.format_price() or None,
    }


def _add(settings: dict[tuple[Section, str], str], section: Section, values: Mapping[str, object]) -> None:
    settings.update(
        {
            (section, clean_text(key)): clean_text(format_setting(value))
            for key, value in values.items()
            if key not in _NOISE
        }
    )


def format_setting(value: object) -> str:
    """Format a setting for people."""
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return _shorten(", ".join(map(format_setting, value))) or "none"
    return _shorten(str(value))


def clean_text(text: str) -> str:
    """Return untrusted text without secrets, surrogates and invisible characters such as bidirectional marks."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


def diff_settings(runs: Sequence[Settings]) -> tuple[tuple[Setting, ...], int]:
    """Return settings that differ, by section, and the number of settings equal in all runs with that section."""
    keys = dict.fromkeys(key for settings in runs for key in settings)
    sections = [{section for section, _ in settings} for settings in runs]
    different, num_equal = [], 0
    for section, key in sorted(keys, key=lambda pair: SECTIONS.index(pair[0])):
        values = tuple(settings.get((section, key)) for settings in runs)
        distinct = {value for value, known in zip(values, sections, strict=True) if section in known}
        if section == "versions":  # unknown for runs that were not started
            distinct -= {None}
        if len(distinct) > 1:
            different.append(Setting(section=section, key=key, values=values))
        else:
            num_equal += 1
    return tuple(different), num_equal
