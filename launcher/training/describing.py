"""Gathers what a model card tells: from the run directory, wherever the card is written."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from launcher import __version__, metrics
from launcher.choices import Dtype
from launcher.corpus.tokenizer import load_tokenizer
from launcher.errors import LauncherError
from launcher.inputs import base_folders
from launcher.manifest import Manifest, load_manifest
from launcher.metrics import StepMetrics, load_metrics
from launcher.paths import RunPaths, write_text_atomically
from launcher.plan.model import Plan
from launcher.record import load_outcome
from launcher.training.card import CardFacts, CardKind, PromptFormat, render_card
from launcher.training.prompts import describe_prompt

CARD_FILE = "README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    final: float | None
    best: float | None  # on held-out rows
    best_step: int | None


def write_card(plan: Plan, paths: RunPaths, *, steps_done: int, saved_step: int) -> None:
    """Into the folder of what was trained. A training never fails for want of its card."""
    try:
        manifest = load_manifest(paths.manifest).manifest
        kind: CardKind = "full" if plan.adapter.kind == "full" else "adapter"
        dtype = plan.precision.compute_dtype if kind == "full" else plan.precision.base_dtype
        facts = gather_facts(kind, plan, manifest, paths, steps_done=steps_done, saved_step=saved_step, dtype=dtype)
        write_text_atomically(paths.adapter / CARD_FILE, render_card(facts))
    except (LauncherError, OSError, ValueError) as error:
        print(f"warning: no model card was written: {error}", file=sys.stderr)


def gather_facts(
    kind: CardKind,
    plan: Plan,
    manifest: Manifest,
    paths: RunPaths,
    *,
    steps_done: int,
    saved_step: int,
    dtype: Dtype,
) -> CardFacts:
    losses = find_losses(_load_metrics(paths.metrics))
    outcome = load_outcome(paths.outcome)
    return CardFacts(
        kind=kind,
        plan=plan,
        manifest=manifest,
        run_id=paths.run_id,
        dtype=dtype,
        prompt=_find_prompt(plan),
        steps_done=steps_done,
        saved_step=saved_step,
        final_loss=losses.final,
        best_loss=losses.best,
        best_step=losses.best_step,
        data_key=None if outcome is None else outcome.data_key,
        launcher_version=__version__ if outcome is None else outcome.versions.get("launcher", __version__),
        git_commit=None if outcome is None else outcome.git_commit,
    )


def find_losses(rows: list[StepMetrics]) -> Losses:
    trained = [loss for row in rows if (loss := row.get(metrics.TRAIN_LOSS)) is not None]
    held_out = [(loss, row.step) for row in rows if (loss := row.get(metrics.EVAL_LOSS)) is not None]
    best, best_step = min(held_out) if held_out else (None, None)
    return Losses(final=trained[-1] if trained else None, best=best, best_step=best_step)


def _load_metrics(path: Path) -> list[StepMetrics]:
    try:
        return load_metrics(path)
    except (OSError, ValueError):
        return []


def _find_prompt(plan: Plan) -> PromptFormat | None:
    try:
        return describe_prompt(plan, load_tokenizer(plan.base.name, base_folders(Path(plan.data.folder))))
    except LauncherError:
        return None
