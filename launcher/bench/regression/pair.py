"""Plans of the two trainings to compare: the same rows, epochs and seed, and equally many rows per step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from launcher.bench.regression.settings import PREFIX, SettingChange, compare_settings, make_old_settings
from launcher.core.errors import InputError
from launcher.corpus.audit import Audit
from launcher.plan.model import Plan, SchedulePlan
from launcher.request.request import PlannedRun, Request, plan_request

SideName = Literal["old", "new"]
# Both are evaluated after training, on more rows than fit into a training. --set overrides this.
_NO_TASK_EVAL = "evaluation.task_rows=0"
_LENGTH_KEYS = frozenset(f"{PREFIX}{key}" for key in ("epochs", "num_epochs", "max_steps"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two trainings."""

    name: SideName
    planned: PlannedRun

    @property
    def plan(self) -> Plan:
        """The plan of this training."""
        return self.planned.plan

    @property
    def request(self) -> Request:
        """The request it was planned from."""
        return self.planned.request


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The old and the new training, and how their settings differ."""

    old: Side
    new: Side
    settings: tuple[SettingChange, ...]
    notes: tuple[str, ...]  # what limits the comparison

    @property
    def changed(self) -> tuple[SettingChange, ...]:
        """The settings that differ."""
        return tuple(setting for setting in self.settings if setting.has_effect)


def plan_pair(request: Request, prepare: Callable[[PlannedRun], Audit]) -> Pair:
    """Plan both trainings; `prepare` prepares the new one's data, which tells how many rows share a sequence."""
    without_task_eval = replace(request, overrides=(_NO_TASK_EVAL, *request.overrides))
    complete = use_complete_epochs(plan_request(without_task_eval))
    new = plan_request(complete)
    audit = prepare(new)
    _check_has_test_rows(new.plan.expert, audit)
    settings = make_old_settings(new.plan)
    rows = match_rows(new.plan, audit)
    overrides = (
        *complete.overrides,
        *(setting.override for setting in settings),
        f"{PREFIX}batch_size={rows}",
        f"{PREFIX}gradient_accumulation_steps=1",
    )
    old = plan_request(replace(complete, overrides=overrides))
    return Pair(
        old=Side(name="old", planned=old),
        new=Side(name="new", planned=new),
        settings=compare_settings(settings, old.plan, new.plan),
        notes=tuple(list_caveats(new.plan.schedule)),
    )


def use_complete_epochs(planned: PlannedRun) -> Request:
    """Replace the smoke profile's 60 steps, which end within an epoch where both would have seen different rows.

    An epoch of a sample is 58 to 78 such steps: about as long, and both see every row once.
    """
    is_smoke, has_length = planned.plan.profile == "smoke", bool(planned.loaded.overridden_keys & _LENGTH_KEYS)
    if not is_smoke or has_length:
        return planned.request
    key = "num_epochs" if planned.loaded.manifest.training.config.num_epochs is not None else "epochs"
    return replace(planned.request, overrides=(*planned.request.overrides, f"{PREFIX}{key}=1"))


def match_rows(plan: Plan, audit: Audit) -> int:
    """Return the mean number of rows per step of this plan: sequences per global batch times rows per sequence."""
    train = audit.splits["train"]
    return max(1, round(plan.batch.global_batch_size * train.num_documents / max(1, train.num_packs)))


def list_caveats(schedule: SchedulePlan) -> list[str]:
    """Packs and single rows are shuffled differently, so an incomplete epoch has different rows in the two runs."""
    if schedule.max_steps is not None:
        return [
            f"{schedule.max_steps:,} steps may end within an epoch: both runs train equally many rows, but not the same"
        ]
    if schedule.epochs % 1:
        return [f"{schedule.epochs:g} epochs end within an epoch: both runs train equally many rows, but not the same"]
    return []


def _check_has_test_rows(expert: str, audit: Audit) -> None:
    splits = (audit.splits.get(name) for name in ("test", "validation"))
    if not any(split is not None and split.num_documents for split in splits):
        raise InputError(
            f"{expert} has no rows to evaluate on: neither a test nor a validation split",
            hint="set training.dataset.test_path to a file of such rows",
        )
