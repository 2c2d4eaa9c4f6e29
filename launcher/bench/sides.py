"""The sides of a comparison, planned: each with one value of the key, and what else the plan then decides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.bench.varying import Variation
from launcher.errors import InputError, LauncherError, Problem
from launcher.inputs import PlannedRun, Request, plan_request
from launcher.plan.model import Plan

# What a plan says about itself and what no step ever sees.
_NOT_RUN = {"manifest_sha256", "decisions", "notes", "memory", "speed", "ladder", "wandb", "guards", "tasks"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    label: str
    planned: PlannedRun

    @property
    def plan(self) -> Plan:
        return self.planned.plan


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionChange:
    """A decision that is not the same on all sides: the change itself, or what follows from it."""

    name: str
    values: tuple[str | None, ...]  # one a side; None: it is not decided there
    reasons: tuple[str | None, ...]


def plan_sides(request: Request, variation: Variation) -> tuple[Side, ...]:
    """All of them before anything is measured: a side that cannot run is said at once."""
    sides = tuple(
        Side(label=label, planned=_plan(replace(request, overrides=(*request.overrides, override)), label))
        for label, override in zip(variation.labels, variation.overrides, strict=True)
    )
    for side in sides:
        check_one_process(side.plan, side.label)
    _check_differ(sides, variation)
    return sides


def _plan(request: Request, label: str) -> PlannedRun:
    try:
        return plan_request(request)
    except LauncherError as error:
        raise InputError(f"{label} has no plan here: {error.title}", error.problems, error.hint) from None


def check_one_process(plan: Plan, label: str) -> None:
    if plan.hardware.num_ranks > 1 or plan.strategy != "single":
        raise InputError(
            f"{label} is planned for {plan.hardware.num_ranks} ranks ({plan.strategy}); bench measures one process",
            hint="--gpus 1 measures one GPU; `launcher train --max-steps N` and `launcher compare` measure many",
        )


def _check_differ(sides: tuple[Side, ...], variation: Variation) -> None:
    """Two sides of one plan would measure the machine's noise."""
    for place, side in enumerate(sides):
        for other in sides[:place]:
            if _dump(side.plan) == _dump(other.plan):
                raise InputError(
                    f"{other.label} and {side.label} run the same here: their plans do not differ",
                    tuple(_find_reasons(side.plan, variation)),
                    "`launcher plan` shows what is decided on this machine, and why",
                )


def _dump(plan: Plan) -> dict[str, object]:
    return plan.model_dump(mode="json", exclude=_NOT_RUN)


def _find_reasons(plan: Plan, variation: Variation) -> list[Problem]:
    """The decision that is named like the key, where there is one."""
    words = set(variation.path.rpartition(".")[2].split("_"))
    return [
        Problem(where=decision.name, what=f"{decision.value}: {decision.reason}")
        for decision in plan.decisions
        if words & set(decision.name.replace(".", " ").split())
    ]


def find_changes(sides: tuple[Side, ...]) -> tuple[DecisionChange, ...]:
    """In the order of the plan."""
    decided = [{decision.name: decision for decision in side.plan.decisions} for side in sides]
    names = list(dict.fromkeys(name for decisions in decided for name in decisions))
    changes = []
    for name in names:
        values = tuple(decisions[name].value if name in decisions else None for decisions in decided)
        if len(set(values)) > 1:
            reasons = tuple(decisions[name].reason if name in decisions else None for decisions in decided)
            changes.append(DecisionChange(name=name, values=values, reasons=reasons))
    return tuple(changes)
