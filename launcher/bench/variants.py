"""The variants of an A/B test: the values of `--vary KEY=A,B`, a plan for each, and the decisions that differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.core.errors import InputError, LauncherError, Problem
from launcher.core.frozen_model import Frozen
from launcher.manifest.config import TrainingConfig
from launcher.manifest.model import Manifest
from launcher.manifest.overrides import parse_value
from launcher.manifest.parse_json import shorten
from launcher.manifest.problems import SYNONYMS
from launcher.manifest.suggest import find_closest
from launcher.plan.model import Plan
from launcher.request.request import PlannedRun, Request, plan_request

_PREFIX = "training.config."
_EXAMPLE = "--vary torch_compile=true,false"
_MAX_VALUES = 6  # more variants take too long to measure

# Parts of a plan that do not affect a training step.
_NOT_EXECUTED = {
    "manifest_sha256",
    "hardware",  # the same machine; free RAM changes between two plans
    "decisions",
    "notes",
    "memory",
    "speed",
    "oom_fallbacks",
    "wandb",
    "guards",
    "task_eval",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """The manifest key that an A/B test varies, and its values, one per variant; the first variant is the reference."""

    key: str  # as given
    path: str  # as --set takes it
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One variant of an A/B test: a value of the varied key, and the plan made with it."""

    label: str
    planned: PlannedRun

    @property
    def plan(self) -> Plan:
        """The plan of this variant."""
        return self.planned.plan


class ChangedDecision(Frozen):
    """A decision that differs between variants: the varied key itself, or a consequence of it."""

    name: str
    values: tuple[str | None, ...]  # one per variant; None: not decided there
    reasons: tuple[str | None, ...]


def parse_vary(text: str) -> Variation:
    """Parse the `KEY=A,B` of `--vary`; raises InputError if it is malformed or two values are the same."""
    key, equals, rest = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--vary {shorten(text)}: must be KEY=A,B", hint=_EXAMPLE)
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
    """Return the manifest path of a key: `packing` is training.config.packing; raises InputError if it is unknown."""
    fields = TrainingConfig.model_fields
    if key in fields:
        return f"{_PREFIX}{key}"
    if "." in key or "[" in key or key in Manifest.model_fields:
        return key
    suggestion = SYNONYMS.get(key) or find_closest(key, fields)
    raise InputError(
        f"--vary {shorten(key)}: not a key of training.config",
        hint=f"did you mean {suggestion}?" if suggestion else "use a path for other keys: base_models.0.quantization",
    )


def plan_variants(request: Request, variation: Variation) -> tuple[Variant, ...]:
    """Plan all variants before anything is measured, so that one that cannot run is reported at once."""
    variants = []
    for value in variation.values:
        label = f"{variation.key}={value}"
        try:
            overrides = (*request.overrides, f"{variation.path}={value}")
            planned = plan_request(replace(request, overrides=overrides))
        except LauncherError as error:
            raise InputError(f"{label} cannot be planned here: {error.title}", error.problems, error.hint) from None
        variants.append(Variant(label=label, planned=planned))
    for variant in variants:
        check_one_process(variant.plan, variant.label)
    _check_plans_differ(variants, variation)
    return tuple(variants)


def check_one_process(plan: Plan, label: str) -> None:
    """Raise InputError for a plan with more than one rank."""
    if plan.hardware.num_ranks > 1 or plan.strategy != "single":
        raise InputError(
            f"{label} is planned for {plan.hardware.num_ranks} ranks ({plan.strategy}); bench measures one process",
            hint="--gpus 1 measures one GPU; `launcher train --max-steps N` and `launcher compare` measure many",
        )


def _check_plans_differ(variants: Sequence[Variant], variation: Variation) -> None:
    """Raise InputError if two variants have the same plan, because they would only measure noise."""
    for index, variant in enumerate(variants):
        for other in variants[:index]:
            plans = [one.plan.model_dump(mode="json", exclude=_NOT_EXECUTED) for one in (variant, other)]
            if plans[0] == plans[1]:
                raise InputError(
                    f"{other.label} and {variant.label} have the same plan here: there is nothing to compare",
                    tuple(_list_reasons(variant.plan, variation)),
                    "`launcher plan` shows what is decided on this machine, and why",
                )


def _list_reasons(plan: Plan, variation: Variation) -> list[Problem]:
    """Return the plan's decisions whose names share a word with the varied key, with their reasons."""
    words = set(variation.path.rpartition(".")[2].split("_"))
    return [
        Problem(where=decision.name, what=f"{decision.value}: {decision.reason}")
        for decision in plan.decisions
        if words & set(decision.name.replace(".", " ").split())
    ]


def list_changes(variants: Sequence[Variant]) -> tuple[ChangedDecision, ...]:
    """Return the plan decisions in which the variants differ, in the order of the plan."""
    by_variant = [{decision.name: decision for decision in variant.plan.decisions} for variant in variants]
    changes = []
    for name in dict.fromkeys(name for decisions in by_variant for name in decisions):
        values = tuple(decisions[name].value if name in decisions else None for decisions in by_variant)
        if len(set(values)) > 1:
            reasons = tuple(decisions[name].reason if name in decisions else None for decisions in by_variant)
            changes.append(ChangedDecision(name=name, values=values, reasons=reasons))
    return tuple(changes)
