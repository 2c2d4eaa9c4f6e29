"""Whose answers are looked at: a run's, an adapter's from elsewhere, or the base's without any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import InputError
from launcher.inputs import Request, plan_request
from launcher.manifest import Manifest
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.training.finished import FinishedRun, load_finished


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    title: str  # `run neo4j-…`, `adapter …`, `base …`
    plan: Plan
    manifest: Manifest
    run: FinishedRun | None  # where its weights lie; None: the base alone

    def load(self) -> Any:
        """On this machine's GPU where it fits, in the dtype that the base was published in."""
        from launcher.training.answering import load_base_alone, load_generating

        return load_base_alone(self.plan) if self.run is None else load_generating(self.run)


def find_subject(*, run: Path | None, adapter: Path | None, expert: str | None, profile: str) -> Subject:
    if run is not None:
        finished = load_finished(run)
        return Subject(
            title=f"run {finished.paths.run_id}", plan=finished.plan, manifest=finished.manifest, run=finished
        )
    assert expert is not None
    planned = plan_request(Request(expert=expert, profile=profile))  # type: ignore[arg-type]
    plan, manifest = planned.plan, planned.loaded.manifest
    if adapter is None:
        return Subject(title=f"base {plan.base.name}", plan=plan, manifest=manifest, run=None)
    if not (adapter / "adapter_config.json").is_file():
        raise InputError(f"{adapter} is not an adapter in PEFT's format: it has no adapter_config.json")
    finished = FinishedRun(paths=_Elsewhere(adapter), plan=plan, manifest=manifest, outcome=None)
    return Subject(title=f"adapter {adapter}", plan=plan, manifest=manifest, run=finished)


class _Elsewhere(RunPaths):
    """An adapter that lies alone."""

    @property
    def adapter(self) -> Path:
        return self.root
