"""The variants of an A/B test: a plan for each value of the varied key, and the decisions that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.bench.vary_flag import Variation
from launcher.core.errors import InputError, LauncherError, Problem
from launcher.plan.model import Plan
from launcher.request.request import PlannedRun, Request, plan_request

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
class Variant:
    """One value of the varied key, planned."""

    label: str
    planned: PlannedRun

    @property
    def plan(self) -> Plan:
        """The plan of this variant."""
        return self.planned.plan


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionChange:
    """A decision that differs between variants: the varied key itself, or a consequence of it."""

    name: str
    values: tuple[str | None, ...]  # one per variant; None: not decided there
    reasons: tuple[str | None, ...]


def plan_variants(request: Request, variation: Variation) -> tuple[Variant, ...]:
    """Plan all variants before anything is measured, so that one that cannot run is reported at once."""
    variants = tuple(
        Variant(label=label, planned=_plan(replace(request, overrides=(*request.overrides, override)), label))
        for label, override in zip(variation.labels, variation.overrides, strict=True)
    )
    for variant in variants:
        check_one_process(variant.plan, variant.label)
    _check_plans_differ(variants, variation)
    return variants


def _plan(request: Request, label: str) -> PlannedRun:
    try:
        return plan_request(request)
    except LauncherError as error:
        raise InputError(f"{label} cannot be planned here: {error.title}", error.problems, error.hint) from None


def check_one_process(plan: Plan, label: str) -> None:
    """Raise InputError for a plan with more than one rank."""
    if plan.hardware.num_ranks > 1 or plan.strategy != "single":
        raise InputError(
            f"{label} is planned for {plan.hardware.num_ranks} ranks ({plan.strategy}); bench measures one process",
            hint="--gpus 1 measures one GPU; `launcher train --max-steps N` and `launcher compare` measure many",
        )


def _check_plans_differ(variants: tuple[Variant, ...], variation: Variation) -> None:
    """Two variants with the same plan would only measure noise."""
    for index, variant in enumerate(variants):
        for other in variants[:index]:
            if _dump_executed(variant.plan) == _dump_executed(other.plan):
                raise InputError(
                    f"{other.label} and {variant.label} run the same here: their plans do not differ",
                    tuple(_list_reasons(variant.plan, variation)),
                    "`launcher plan` shows what is decided on this machine, and why",
                )


def _dump_executed(plan: Plan) -> dict[str, object]:
    return plan.model_dump(mode="json", exclude=_NOT_EXECUTED)


def _list_reasons(plan: Plan, variation: Variation) -> list[Problem]:
    """Return the decisions whose names share a word with the key."""
    words = set(variation.path.rpartition(".")[2].split("_"))
    return [
        Problem(where=decision.name, what=f"{decision.value}: {decision.reason}")
        for decision in plan.decisions
        if words & set(decision.name.replace(".", " ").split())
    ]


def list_changes(variants: tuple[Variant, ...]) -> tuple[DecisionChange, ...]:
    """Return the decisions that differ, in the order of the plan."""
    by_variant = [{decision.name: decision for decision in variant.plan.decisions} for variant in variants]
    changes = []
    for name in dict.fromkeys(name for decisions in by_variant for name in decisions):
        values = tuple(decisions[name].value if name in decisions else None for decisions in by_variant)
        if len(set(values)) > 1:
            reasons = tuple(decisions[name].reason if name in decisions else None for decisions in by_variant)
            changes.append(DecisionChange(name=name, values=values, reasons=reasons))
    return tuple(changes)
