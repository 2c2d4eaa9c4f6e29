"""The inputs of a plan in one object, and constructors for decisions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher.base_models.shapes import ModelShape
from launcher.core.choices import Profile, Strategy
from launcher.hardware.model import Gpu, Hardware
from launcher.manifest.config import TrainingConfig
from launcher.manifest.model import BaseModelEntry, Manifest
from launcher.plan.calibration import NO_CALIBRATION, Calibration
from launcher.plan.estimate.dataset_size import RowEstimate
from launcher.plan.model import Decision, GuardPlan, ProfilePlan

DEFAULT_GUARDS = GuardPlan(save_errors="stop", max_nonfinite_steps=3, hang_seconds=600)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options that do not come from the manifest: the command line, and earlier runs of this machine."""

    profile: Profile = "full"
    profile_reason: str = "requested"
    strategy: Strategy | None = None
    price_per_gpu_hour: float | None = None
    price_per_node_hour: float | None = None  # instead of a price per GPU
    currency: str = ""
    random_weights: bool = False
    guards: GuardPlan = DEFAULT_GUARDS
    profile_steps: ProfilePlan | None = None
    oom_bytes: int | None = None  # prediction of a similar plan that ran out of memory on the same hardware
    oom_date: str = ""
    calibration: Calibration = NO_CALIBRATION  # measured runs of this machine
    manifest_folder: str = ""
    overridden_keys: frozenset[str] = frozenset()  # dotted manifest keys set on the command line
    key_flags: Mapping[str, str] = field(default_factory=dict)  # such keys -> the flag, if it is not --set
    judge_gaps: str = ""  # what the boundary around judges does not prevent on this machine
    chat_template: str | None = None  # source of the manifest's own template
    input_notes: tuple[str, ...] = ()  # about manifest, base model and flags
    uses_sample: bool = True  # smoke profile: train on the sample next to the manifest, not on the manifest's dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanContext:
    """Inputs of all decisions of the plan: manifest, hardware, base model, rows and options."""

    manifest: Manifest
    config: TrainingConfig  # the manifest's; in the smoke profile with smaller sizes
    hardware: Hardware
    base: ModelShape
    rows: RowEstimate
    options: PlanOptions
    replaced: Mapping[str, str] = field(default_factory=dict)  # decision -> why the smoke profile replaces it

    @property
    def entry(self) -> BaseModelEntry:
        """Return the manifest's entry of the trained base model."""
        return self.manifest.base

    @property
    def gpu(self) -> Gpu | None:
        """Return the GPU model, or None for a machine without one."""
        return self.hardware.gpu

    @property
    def num_ranks(self) -> int:
        """Return the number of training processes."""
        return self.hardware.num_ranks

    def lacks(self, package: str) -> bool:
        """Return whether this machine lacks an optional package; hardware of the catalogue is assumed to have it."""
        return self.hardware.source == "probe" and package not in self.hardware.packages

    @property
    def is_smoke(self) -> bool:
        """Return whether this is the smoke profile."""
        return self.options.profile == "smoke"


def manifest_decision(name: str, value: str, reason: str) -> Decision:
    """Return a decision made by the manifest."""
    return Decision(name=name, value=value, reason=reason, decided_by="manifest")


def plan_decision(name: str, value: str, reason: str) -> Decision:
    """Return a decision made by the plan."""
    return Decision(name=name, value=value, reason=reason, decided_by="plan")


def flag_decision(name: str, value: str, reason: str) -> Decision:
    """Return a decision made by a flag."""
    return Decision(name=name, value=value, reason=reason, decided_by="command line")


def hardware_decision(name: str, value: str, reason: str) -> Decision:
    """Return a decision forced by the hardware."""
    return Decision(name=name, value=value, reason=reason, decided_by="hardware")


def user_decision(name: str, value: str) -> Decision:
    """Return a decision for a value taken from the user's hardware.json."""
    return Decision(name=name, value=value, reason="your hardware.json", decided_by="user")


SMOKE_PREFIX = "smoke profile: "  # of reasons for replaced values
# Keys that decide a setting, where its reason does not name them.
_SILENT_KEYS = {
    "global batch": ("max_seq_length", "packing"),
    "learning rate": (
        *("learning_rate", "warmup_steps", "warmup_ratio", "seed"),
        *("lr_scheduler", "num_cycles", "power", "lr_end"),
    ),
    "adapter": ("adapter_type", "rank", "alpha", "target_modules", "use_rslora", "dropout", "lora_dropout"),
    "checkpoints": ("save_steps", "save_epochs", "save_total_limit"),
    "weight decay": ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    "evaluation": ("eval_steps", "eval_epochs"),
    "exported checkpoint": (
        *("load_best_model_at_end", "metric_for_best_model"),
        *("early_stopping_patience", "early_stopping_threshold"),
    ),
}


def name_flags(decisions: Iterable[Decision], options: PlanOptions) -> Iterator[Decision]:
    """Yield the decisions; those about manifest keys that flags have set name the flags instead of the manifest."""
    for decision in decisions:
        words = {*re.findall(r"\w+", decision.reason), *_SILENT_KEYS.get(decision.name, ())}
        keys = sorted(key for key in options.overridden_keys if key.rpartition(".")[2] in words)
        flags = ", ".join(dict.fromkeys(_name_flag(key, options) for key in keys))
        if flags and decision.reason.startswith(SMOKE_PREFIX):  # other values of this setting were replaced
            decision = decision.model_copy(update={"reason": f"{decision.reason}; {flags}"})
        if decision.decided_by != "manifest" or not flags:
            yield decision
            continue
        rest = re.sub(
            r"^(\w+ in the manifest|training\.config[.\w]*|max_steps$|evaluation\.task_rows is 0)([;:] )?",
            "",
            decision.reason,
        )
        yield flag_decision(decision.name, decision.value, f"{flags}; {rest}" if rest else flags)


def _name_flag(key: str, options: PlanOptions) -> str:
    if key == "training.config.precision":
        return "--precision"
    if key.startswith("training.config.wandb."):  # these keys have flags of their own
        name = key.rpartition(".")[2]
        return "--wandb" if name == "mode" else f"--wandb-{name}"
    return options.key_flags.get(key, f"--set {key}")
