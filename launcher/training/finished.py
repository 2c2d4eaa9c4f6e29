"""A run that was trained, read back from its directory. Nothing heavy is imported here: mistakes are told at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.errors import InputError
from launcher.manifest import Manifest, load_manifest
from launcher.paths import RunPaths
from launcher.plan import Plan, load_plan
from launcher.record import Outcome, load_outcome

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MODEL_FILES = ("config.json",)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    paths: RunPaths
    plan: Plan
    manifest: Manifest
    outcome: Outcome | None  # None: it cannot be read; the weights count

    @property
    def is_full(self) -> bool:
        """The folder `adapter` is the whole model."""
        return self.plan.adapter.kind == "full"

    @property
    def is_cut_short(self) -> bool:
        return self.outcome is not None and self.outcome.status != "done"


def load_finished(root: Path) -> FinishedRun:
    """Raises where there is nothing to load: no run, no weights, or weights that mean nothing."""
    paths = RunPaths(root.resolve())
    plan = _load_plan(paths)
    if plan.random_weights:
        raise InputError(
            f"{root}: this run trained on random weights in the shape of {plan.base.name} (--random-weights)",
            hint="such a run measures speed and memory; train without --random-weights for weights of use",
        )
    outcome = load_outcome(paths.outcome)
    _check_weights(paths, plan, outcome)
    return FinishedRun(paths=paths, plan=plan, manifest=load_manifest(paths.manifest).manifest, outcome=outcome)


def _load_plan(paths: RunPaths) -> Plan:
    if not paths.plan.is_file():
        raise InputError(f"{paths.root} is not a run directory: it has no {paths.plan.name}")
    return load_plan(paths.plan)


def _check_weights(paths: RunPaths, plan: Plan, outcome: Outcome | None) -> None:
    wanted = _MODEL_FILES if plan.adapter.kind == "full" else _ADAPTER_FILES
    if not paths.adapter.is_dir():
        raise InputError(f"{paths.root} has no trained weights: {_tell_why(outcome)}", hint=_tell_way_out(paths))
    missing = [name for name in wanted if not (paths.adapter / name).is_file()]
    if missing:
        raise InputError(f"{paths.adapter} is not whole: {', '.join(missing)} is missing", hint=_tell_way_out(paths))


def _tell_why(outcome: Outcome | None) -> str:
    if outcome is None:
        return "it was not started"
    if outcome.status == "running":
        return "it still runs, or was killed without a word"
    return f"it {'was stopped' if outcome.status == 'stopped' else outcome.status} after step {outcome.steps_done:,}"


def _tell_way_out(paths: RunPaths) -> str:
    saved = sorted(folder.name for folder in paths.checkpoints.glob("step-*")) if paths.checkpoints.is_dir() else []
    if saved:
        return f"its last checkpoint is {paths.checkpoints / saved[-1]}; or train again"
    return "train it to its end"
