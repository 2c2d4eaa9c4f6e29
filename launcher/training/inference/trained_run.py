"""Load what a finished run left in its directory. Imports no torch, so that input errors are reported at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from launcher.core.errors import InputError, first_line
from launcher.core.run_files import check_regular_files, load_model
from launcher.core.run_paths import RunPaths, format_resume_command
from launcher.corpus.template_sandbox import limit_time
from launcher.manifest import Manifest, load_manifest
from launcher.manifest.parse_json import shorten
from launcher.manifest.trust import allow_remote_code, check_trust, list_remote_code
from launcher.plan import Plan, load_plan
from launcher.runs.record import Outcome, load_outcome

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MODEL_FILES = ("config.json",)


# Names of modules, which PEFT uses as parts of regular expressions. A length in the pattern would take pydantic 0.1 s
# to compile, in each process that trains or asks.
_Name = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$", max_length=200)]
_AnchoredName = Annotated[str, StringConstraints(pattern=r"^\^?[\w.-]+$", max_length=200)]
_Names = list[_Name] | _Name | None
# A text is a regular expression for the whole path of a module. A hostile one may never end: it has a time limit.
_NamesOrPattern = list[_Name] | Annotated[str, StringConstraints(max_length=4000)] | None
PATTERN_FIELDS = ("target_modules", "exclude_modules", "feedforward_modules")
PATTERN_SECONDS = 10


class AdapterConfig(BaseModel):
    """The part of PEFT's adapter_config.json that is checked before PEFT reads it."""

    peft_type: Literal["LORA", "IA3"] = "LORA"
    r: Annotated[int, Field(ge=1, le=65536)] | None = None
    target_modules: _NamesOrPattern = None
    exclude_modules: _NamesOrPattern = None
    feedforward_modules: _NamesOrPattern = None
    modules_to_save: _Names = None
    layers_pattern: _Names = None
    rank_pattern: dict[_AnchoredName, int] | None = None
    alpha_pattern: dict[_AnchoredName, float] | None = None
    layer_replication: None = None  # may multiply the layers
    megatron_config: None = None  # PEFT imports the module in megatron_core


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """A run with trained weights."""

    paths: RunPaths
    plan: Plan
    manifest: Manifest
    outcome: Outcome | None  # None: unreadable; the weights are enough

    @property
    def is_full(self) -> bool:
        """Whether all weights were trained: the folder `adapter` is then a complete model."""
        return self.plan.adapter.kind == "full"

    @property
    def trusts_code(self) -> bool:
        """Whether the model's Python files are executed; raises InputError if they are needed but not trusted."""
        return allow_remote_code(self.plan.trust_remote_code, self.plan.base.name)

    def with_system(self, system: str | None = None) -> TrainedRun:
        """Return the run with a system message for prompts without one: `system`, or that of all training rows."""
        shared = "" if self.outcome is None else self.outcome.shared_system
        if system is None and not shared:
            return self
        data = self.plan.data.model_copy(update={"system_prompt": shared if system is None else system})
        return replace(self, plan=self.plan.model_copy(update={"data": data}))

    @property
    def ended_early(self) -> bool:
        """Whether the training did not reach its last step."""
        return self.outcome is not None and self.outcome.status != "done"


def load_trained_run(root: Path) -> TrainedRun:
    """Load a run's metadata; raise InputError if it has no usable weights."""
    paths = RunPaths(root.resolve())
    if not paths.plan.is_file():
        raise InputError(f"{paths.root} is not a run directory: it has no {paths.plan.name}")
    plan = load_plan(paths.plan)
    if plan.random_weights:
        raise InputError(
            f"{root}: this run trained on random weights in the shape of {plan.base.name} (--random-weights)",
            hint="it only measures speed and memory; train again without --random-weights",
        )
    check_trust(list_remote_code(plan.trust_remote_code, plan.base.name), root)
    outcome = load_outcome(paths.outcome)
    _check_weights(paths, plan, outcome)
    return TrainedRun(paths=paths, plan=plan, manifest=load_manifest(paths.manifest).manifest, outcome=outcome)


def _check_weights(paths: RunPaths, plan: Plan, outcome: Outcome | None) -> None:
    required = _MODEL_FILES if plan.adapter.kind == "full" else _ADAPTER_FILES
    if not paths.adapter.is_dir():
        raise InputError(
            f"{paths.root} has no trained weights: {_describe_outcome(outcome)}",
            hint=_suggest_fix(paths, outcome),
        )
    missing = [name for name in required if not (paths.adapter / name).is_file()]
    if missing:
        raise InputError(
            f"{paths.adapter} is incomplete: {', '.join(missing)} is missing",
            hint=_suggest_fix(paths, outcome),
        )
    if plan.adapter.kind == "full":
        check_regular_files(paths.adapter)
    else:
        check_adapter(paths.adapter)


def check_adapter(folder: Path) -> None:
    """Raise InputError if a folder is not a PEFT adapter in safetensors files, or its config may be malicious."""
    for name in _ADAPTER_FILES:
        if not (folder / name).is_file():
            raise InputError(f"{folder} is not a PEFT adapter: it has no {name}")
    check_regular_files(folder)
    file = folder / "adapter_config.json"
    config = load_model(AdapterConfig, file)
    for field in PATTERN_FIELDS:
        if isinstance(pattern := getattr(config, field), str):
            _check_pattern(file, field, pattern)


def _check_pattern(file: Path, field: str, pattern: str) -> None:
    """Raise InputError if a pattern for modules' names is not a regular expression."""
    try:
        with limit_time(PATTERN_SECONDS, TimeoutError(f"takes more than {PATTERN_SECONDS} s")):
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError, TimeoutError) as error:
        raise InputError(
            f"{file}: {field} {shorten(pattern)!r} is not a usable regular expression: {first_line(error)}",
            hint="PEFT takes a list of names, one regular expression for whole paths of modules, or all-linear",
        ) from None


def _describe_outcome(outcome: Outcome | None) -> str:
    if outcome is None:
        return "it was not started, or its outcome.json is damaged"
    match outcome.status:
        case "running":
            return "it is still running, or was killed"
        case "done":
            return f"it is done after step {outcome.steps_done:,}, but its folder adapter/ is missing"
        case "stopped":
            return f"it was stopped after step {outcome.steps_done:,}"
        case status:
            return f"it {status} after step {outcome.steps_done:,}"


def _suggest_fix(paths: RunPaths, outcome: Outcome | None) -> str:
    if outcome is not None and outcome.status == "done":
        return f"copy {paths.adapter} back, or train it again"
    checkpoints = sorted(paths.checkpoints.glob("step-*")) if paths.checkpoints.is_dir() else []
    resume = format_resume_command(paths.root)
    return f"{resume} continues from {checkpoints[-1].name}" if checkpoints else "train it to the end"
