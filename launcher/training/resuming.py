"""Where a training begins: behind its newest whole checkpoint, if one belongs to it, else at its first step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.checkpoints import BestState, Checkpoint, find_newest, list_checkpoints, step_of
from launcher.errors import InputError, Problem, RunFailedError
from launcher.metrics import TRAIN_LOSS, CutMetrics, cut_metrics, load_metrics
from launcher.plan.learning import find_drift, learning_values
from launcher.training.checkpoint import restore
from launcher.training.handing import hand_out
from launcher.training.position import Position, find_position
from launcher.training.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions:
    allow_drift: bool = False
    verify_steps: int = 0  # so many of the recorded steps are trained again, and compared


def make_resume_options(arguments: argparse.Namespace) -> ResumeOptions:
    return ResumeOptions(allow_drift=arguments.allow_drift, verify_steps=arguments.verify)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    position: Position
    best: BestState | None  # None: the training begins at its first step
    told: CutMetrics  # what was trained before, up to the position and behind it; on the first rank


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """By the first rank, for all."""

    checkpoint: Checkpoint | None
    problems: tuple[Problem, ...]


def begin(run: Run, options: ResumeOptions) -> Beginning:
    """Every rank must call it. What it finds is put into the run; metrics of steps that come again are taken away."""
    is_main = run.engine.is_main
    found = hand_out(run.engine.accelerator, _find(run, options) if is_main else _Found(checkpoint=None, problems=()))
    if found.problems:
        raise InputError(
            f"{run.paths.root}: what is to be trained is not what this run has trained so far",
            found.problems,
            "undo the change, or train it as a new run; --allow-drift goes on all the same",
        )
    manifest = None if found.checkpoint is None else found.checkpoint.manifest
    position = find_position(run, 0 if manifest is None else manifest.step)
    if found.checkpoint is not None and manifest is not None:
        restore(run, found.checkpoint)
        position.chain, position.owes_evaluation = manifest.chain, manifest.owes_evaluation
        run.say(f"resuming after step {manifest.step:,}: {found.checkpoint.folder}")
    told = _cut_metrics(run, position) if is_main else CutMetrics()
    return Beginning(position=position, best=None if manifest is None else manifest.best, told=told)


def _cut_metrics(run: Run, position: Position) -> CutMetrics:
    for file in run.paths.evaluations.glob("step-*.json"):
        is_made_again = position.owes_evaluation and file == run.paths.evaluation_at(position.step)
        if step_of(file.with_suffix("")) > position.step or is_made_again:
            file.unlink(missing_ok=True)
    try:
        return cut_metrics(run.paths.metrics, position.step, without_evaluation=position.owes_evaluation)
    except OSError as error:
        what = f"{run.paths.metrics} cannot be written: {error.strerror}"
        raise RunFailedError(what, hint="is the disk full, or read-only?") from None


def _find(run: Run, options: ResumeOptions) -> _Found:
    checkpoint, damaged = find_newest(run.paths, _find_limit(run, options))
    for one in damaged:
        run.say(f"warning: {one}")
    problems = () if checkpoint is None else tuple(_find_problems(run, checkpoint))
    if options.allow_drift:
        for problem in problems:
            run.say(f"warning: not as before: {problem}")
        problems = ()
    return _Found(checkpoint=checkpoint, problems=problems)


def _find_limit(run: Run, options: ResumeOptions) -> int | None:
    """The newest step to begin behind, so that enough recorded ones come again; None: whatever is newest."""
    if not options.verify_steps:
        return None
    rows = load_metrics(run.paths.metrics) if run.paths.metrics.exists() else []
    last = max((row.step for row in rows if TRAIN_LOSS in row.values), default=0)
    kept = sorted(step_of(folder) for folder in list_checkpoints(run.paths))
    limit = last - options.verify_steps
    if any(step <= limit for step in kept):
        return limit
    earlier = [step for step in kept if step < last]
    if not earlier:
        raise InputError(
            f"{run.paths.root}: there is nothing to verify: no recorded step lies behind a checkpoint that was kept",
            hint="resume without --verify; a larger save_total_limit keeps older checkpoints",
        )
    return earlier[0]


def _find_problems(run: Run, checkpoint: Checkpoint) -> Sequence[Problem]:
    manifest = checkpoint.manifest
    problems = list(find_drift(manifest.learning, learning_values(run.plan)))
    pairs = (
        ("data", manifest.data_key, run.data_key),
        ("base weights", manifest.base, run.base_fingerprint),
        ("steps", manifest.num_steps, run.num_steps),
    )
    problems += [
        Problem(where=where, what=f"{before} before, {now} now") for where, before, now in pairs if before != now
    ]
    if not problems and find_position(run, manifest.step).chain != manifest.chain:
        problems.append(Problem(where="order", what="the packs of the steps so far are not those that were trained"))
    return problems
