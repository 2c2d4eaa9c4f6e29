"""What a plan is made from, gathered in one value, and the ways to state a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.choices import Profile, Strategy
from launcher.hardware import Gpu, Hardware
from launcher.manifest.config import TrainingConfig
from launcher.manifest.model import BaseModelEntry, Manifest
from launcher.plan.calibration import NOTHING_LEARNT, Calibration
from launcher.plan.model import Decision, GuardPlan, ProfilePlan
from launcher.rows import RowEstimate
from launcher.shapes import ModelShape

DEFAULT_GUARDS = GuardPlan(save_errors="stop", max_bad_steps=3, hang_seconds=600)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What the user said beside the manifest."""

    profile: Profile = "full"
    profile_reason: str = "asked for"
    strategy: Strategy | None = None
    price_per_gpu_hour: float | None = None
    random_weights: bool = False
    guards: GuardPlan = DEFAULT_GUARDS
    profiled: ProfilePlan | None = None
    failed_bytes: int | None = None  # predicted, of a plan like this one that ran out of memory on such hardware
    failed_when: str = ""
    calibration: Calibration = NOTHING_LEARNT  # what finished runs of this machine have taught
    manifest_folder: str = ""
    given_keys: frozenset[str] = frozenset()  # of the manifest, dotted, that the command line set
    takes_sample: bool = True  # the smoke profile: rows of the sample beside the manifest, not the manifest's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    manifest: Manifest
    config: TrainingConfig  # the manifest's, or in the smoke profile that with sizes of its own
    hardware: Hardware
    base: ModelShape
    rows: RowEstimate
    options: PlanOptions
    replaced: Mapping[str, str] = field(default_factory=dict)  # a decision -> why the profile takes it

    @property
    def entry(self) -> BaseModelEntry:
        return self.manifest.base

    @property
    def gpu(self) -> Gpu | None:
        return self.hardware.gpu

    @property
    def num_ranks(self) -> int:
        return self.hardware.num_ranks

    def lacks(self, package: str) -> bool:
        """Whether this machine, looked at, does not have an optional package; a machine on paper has them all."""
        return self.hardware.source == "probe" and package not in self.hardware.packages

    @property
    def is_smoke(self) -> bool:
        return self.options.profile == "smoke"


def asked(name: str, value: str, reason: str) -> Decision:
    return Decision(name=name, value=value, reason=reason, decided_by="manifest")


def decided(name: str, value: str, reason: str) -> Decision:
    return Decision(name=name, value=value, reason=reason, decided_by="plan")


def forced(name: str, value: str, reason: str) -> Decision:
    """The hardware leaves no choice."""
    return Decision(name=name, value=value, reason=reason, decided_by="hardware")


def given_by_user(name: str, value: str) -> Decision:
    return Decision(name=name, value=value, reason="your hardware.json", decided_by="user")
