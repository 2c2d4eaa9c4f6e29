"""The two trainings that are compared, planned: the same rows as often, the same seed, as many rows in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from launcher.corpus.audit import Audit
from launcher.errors import InputError
from launcher.inputs import PlannedRun, Request, plan_request
from launcher.plan.model import Plan, SchedulePlan
from launcher.regression.settings import PREFIX, SettingChange, compare_settings, make_old_settings

SideName = Literal["old", "new"]
# Both are asked when they are trained, on more rows than a training has time for. The command line wins over this.
_NOT_ON_THE_WAY = "evaluation.task_rows=0"
_LENGTH_KEYS = frozenset(f"{PREFIX}{key}" for key in ("epochs", "num_epochs", "max_steps"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    name: SideName
    planned: PlannedRun

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def request(self) -> Request:
        return self.planned.request


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    old: Side
    new: Side
    settings: tuple[SettingChange, ...]
    notes: tuple[str, ...]  # what makes the two less than equal

    @property
    def changed(self) -> tuple[SettingChange, ...]:
        return tuple(setting for setting in self.settings if setting.is_real)


def plan_pair(request: Request, prepare: Callable[[PlannedRun], Audit]) -> Pair:
    """`prepare` makes the data of the optimised side: how many rows share a sequence is only known from them."""
    quiet = replace(request, overrides=(_NOT_ON_THE_WAY, *request.overrides))
    whole = make_whole_request(plan_request(quiet))
    new = plan_request(whole)
    audit = prepare(new)
    _check_held_out(new.plan.expert, audit)
    settings = make_old_settings(new.plan)
    rows = match_rows(new.plan, audit)
    overrides = (
        *whole.overrides,
        *(setting.override for setting in settings),
        f"{PREFIX}batch_size={rows}",
        f"{PREFIX}gradient_accumulation_steps=1",
    )
    old = plan_request(replace(whole, overrides=overrides))
    return Pair(
        old=Side(name="old", planned=old),
        new=Side(name="new", planned=new),
        settings=compare_settings(settings, old.plan, new.plan),
        notes=tuple(find_notes(new.plan.schedule)),
    )


def make_whole_request(planned: PlannedRun) -> Request:
    """The smoke profile's 60 steps end inside an epoch, where the two would have seen different rows.

    An epoch of a sample is 58 to 78 such steps: about as long, and both see every row once.
    """
    is_smoke, is_given = planned.plan.profile == "smoke", bool(planned.loaded.given_keys & _LENGTH_KEYS)
    if not is_smoke or is_given:
        return planned.request
    key = "num_epochs" if planned.loaded.manifest.training.config.num_epochs is not None else "epochs"
    return replace(planned.request, overrides=(*planned.request.overrides, f"{PREFIX}{key}=1"))


def match_rows(plan: Plan, audit: Audit) -> int:
    """Rows that a step of this plan trains on average: sequences of a global batch, times rows in a sequence."""
    train = audit.splits["train"]
    return max(1, round(plan.batch.global_batch_size * train.num_documents / max(1, train.num_packs)))


def find_notes(schedule: SchedulePlan) -> list[str]:
    """Packs and rows are shuffled each for themselves: a part of an epoch holds other rows on either side."""
    if schedule.max_steps is not None:
        return [f"{schedule.max_steps:,} steps may end inside an epoch: as many rows on both sides, not the same ones"]
    if schedule.epochs % 1:
        return [f"of {schedule.epochs:g} epochs the last is a part: as many rows on both sides, not the same ones"]
    return []


def _check_held_out(expert: str, audit: Audit) -> None:
    """Before anybody waits for two trainings."""
    splits = (audit.splits.get(name) for name in ("test", "validation"))
    if not any(split is not None and split.num_documents for split in splits):
        raise InputError(
            f"{expert} has no held-out rows to ask: neither a test nor a validation split",
            hint="training.dataset.test_path names a file of them",
        )
