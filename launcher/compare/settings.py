"""Settings of a run under dotted keys, as a person reads them; and those in which runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.compare.model import Section, Setting
from launcher.errors import escape
from launcher.plan.learning import learning_values
from launcher.plan.model import Plan
from launcher.record import Outcome
from launcher.redaction import redact_tree
from launcher.values import flatten

Settings = Mapping[tuple[Section, str], str]

SECTIONS: tuple[Section, ...] = ("what is learnt", "how it runs", "where it runs", "versions", "W&B config")
# Parts of a plan that follow from the settings, or only tell of them.
_DERIVED = frozenset(
    {"schema_version", "launcher_version", "manifest_sha256", "hardware", "base", "base_revision", "memory", "speed"}
    | {"ladder", "decisions", "notes"}
)
_NOISE = frozenset({"data.folder", "data.cache_dir", "data.basis", "data.mean_tokens", "batch.nearest_even_batches"})
_LONGEST = 300


def plan_settings(plan: Plan, outcome: Outcome | None) -> Settings:
    """The manifest's learning values first, then how they are run, on what, and with which versions."""
    tree = plan.model_dump(mode="json")
    learnt = learning_values(plan)
    rest = flatten({key: value for key, value in tree.items() if key not in _DERIVED})
    machine = flatten(_describe_machine(plan), "hardware")
    told: dict[tuple[Section, str], str] = {}
    _add(told, "what is learnt", learnt)
    _add(told, "how it runs", {key: value for key, value in rest.items() if key not in learnt})
    _add(told, "where it runs", machine)
    _add(told, "versions", {"launcher": plan.launcher_version})
    if outcome is not None:
        _add(told, "versions", dict(outcome.versions))
        _add(told, "versions", {"commit": outcome.git_commit})
    return told


def config_settings(config: Mapping[str, object]) -> Settings:
    """Of a W&B run: foreign keys and values, which may hold secrets."""
    told: dict[tuple[Section, str], str] = {}
    is_ours = {"plan", "manifest", "decisions"} <= config.keys()  # which say again what stands beside them
    kept = {key: value for key, value in config.items() if not is_ours or not isinstance(value, dict)}
    _add(told, "W&B config", flatten(redact_tree(kept)) if kept else {})
    return told


def _describe_machine(plan: Plan) -> dict[str, object]:
    hardware = plan.hardware
    return {
        "gpu": None if hardware.gpu is None else hardware.gpu.title,
        "gpus_per_node": hardware.gpus_per_node,
        "nodes": hardware.nodes,
        "cpu_cores_per_node": hardware.cpu_cores_per_node,
    }


def _add(told: dict[tuple[Section, str], str], section: Section, values: Mapping[str, object]) -> None:
    told.update(
        {
            (section, clean_text(key)): clean_text(format_setting(value))
            for key, value in values.items()
            if key not in _NOISE
        }
    )


def format_setting(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return "none" if not value else _shorten(str(value))
    if isinstance(value, list | tuple):
        return _shorten(", ".join(map(format_setting, value))) or "none"
    return _shorten(str(value))


def clean_text(text: str) -> str:
    """Foreign text, fit to stand among ours: no secret, no half character as file names have it, and nothing unseen.

    A mark that turns the direction of writing would turn the words behind it, too.
    """
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def find_differences(runs: Sequence[Settings]) -> tuple[tuple[Setting, ...], int]:
    """Settings that differ, by section; and how many are the same in all runs that have such a section."""
    keys = dict.fromkeys(key for settings in runs for key in settings)
    sections = [{section for section, _ in settings} for settings in runs]
    different, num_equal = [], 0
    for section, key in sorted(keys, key=lambda one: SECTIONS.index(one[0])):
        values = tuple(settings.get((section, key)) for settings in runs)
        seen = {value for value, known in zip(values, sections, strict=True) if section in known}
        if section == "versions":  # of a run that was not started, nothing is known
            seen -= {None}
        if len(seen) > 1:
            different.append(Setting(section=section, key=key, values=values))
        else:
            num_equal += 1
    return tuple(different), num_equal
