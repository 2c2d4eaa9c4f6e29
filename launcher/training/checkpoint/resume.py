"""Find the step that a training starts at: after its newest intact checkpoint, or step 1 if it has none."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.core.errors import InputError, Problem, RunFailedError, hint_for
from launcher.core.metrics import TRAIN_LOSS, CutMetrics, cut_metrics, load_metrics
from launcher.plan.resume_identity import collect_learning_settings, find_changed_settings
from launcher.runs.checkpoints import BestState, Checkpoint, find_newest, list_checkpoints, step_of
from launcher.runs.evaluations import list_evaluations
from launcher.training.checkpoint.progress import TrainProgress, compute_progress
from launcher.training.checkpoint.snapshot import restore
from launcher.training.engine.collectives import broadcast_object
from launcher.training.engine.run import TrainingRun


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions:
    """Options of --resume."""

    allow_changed_inputs: bool = False
    verify_steps: int = 0  # train this many recorded steps again and compare them


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """State that a training starts from: that of a checkpoint, or of step 1."""

    progress: TrainProgress
    best: BestState | None  # None: the training starts at step 1
    metrics: CutMetrics  # recorded rows up to this point (kept) and after it (rest); rank 0 only


def resume_run(run: TrainingRun, options: ResumeOptions) -> ResumePoint:
    """Restore the checkpoint to resume from, if any, and drop metrics of steps that are trained again.

    Every rank must call it.
    """
    is_main = run.engine.is_main
    nothing: tuple[Checkpoint | None, tuple[Problem, ...]] = (None, ())
    checkpoint, problems = broadcast_object(
        run.engine.accelerator, _find_checkpoint(run, options) if is_main else nothing
    )
    if problems:
        raise InputError(
            f"{run.paths.root} cannot be resumed: its inputs changed since the last checkpoint",
            problems,
            "undo the change, or train it as a new run; --allow-changed-inputs resumes anyway",
        )
    progress = compute_progress(run, 0 if checkpoint is None else checkpoint.manifest.step)
    if checkpoint is not None:
        restore(run, checkpoint)
        manifest = checkpoint.manifest
        progress.chain, progress.owes_evaluation = manifest.chain, manifest.owes_evaluation
        run.log(f"resuming after step {manifest.step:,}: {checkpoint.folder}")
    metrics = _cut_metrics(run, progress) if is_main else CutMetrics()
    return ResumePoint(
        progress=progress, best=None if checkpoint is None else checkpoint.manifest.best, metrics=metrics
    )


def _cut_metrics(run: TrainingRun, progress: TrainProgress) -> CutMetrics:
    try:
        for step, file in list_evaluations(run.paths):
            if step > progress.step or (progress.owes_evaluation and step == progress.step):
                file.unlink(missing_ok=True)
        return cut_metrics(run.paths.metrics, progress.step, without_evaluation=progress.owes_evaluation)
    except OSError as error:
        what = f"{error.filename or run.paths.metrics} cannot be written: {error.strerror}"
        raise RunFailedError(what, hint=hint_for(error)) from None


def _find_checkpoint(run: TrainingRun, options: ResumeOptions) -> tuple[Checkpoint | None, tuple[Problem, ...]]:
    """Return the checkpoint to resume from (None: start at step 1) and the inputs that changed since it was saved."""
    checkpoint, damaged = find_newest(run.paths, _find_last_step(run, options))
    for damage in damaged:
        run.warn(str(damage))
    if checkpoint is not None and checkpoint.manifest.step > run.num_steps:
        raise InputError(
            f"{checkpoint.folder} is of step {checkpoint.manifest.step:,}, but the run has {run.num_steps:,} steps",
            hint="raise max_steps, or train a new run",
        )
    problems = () if checkpoint is None else tuple(_find_changes(run, checkpoint))
    if options.allow_changed_inputs:
        for problem in problems:
            run.warn(f"changed since the last checkpoint: {problem}")
        problems = ()
    return checkpoint, problems


def _find_last_step(run: TrainingRun, options: ResumeOptions) -> int | None:
    """Return the last step to resume from that leaves enough recorded steps to verify; None if any step will do."""
    if not options.verify_steps:
        return None
    rows = load_metrics(run.paths.metrics, max_bytes=None) if run.paths.metrics.exists() else []
    last = max((row.step for row in rows if TRAIN_LOSS in row.values), default=0)
    saved = sorted(step_of(folder) for folder in list_checkpoints(run.paths))
    limit = last - options.verify_steps
    if any(step <= limit for step in saved):
        return limit
    earlier = [step for step in saved if step < last]
    if not earlier:
        raise InputError(
            f"{run.paths.root} has nothing to verify: no step was recorded after the remaining checkpoints",
            hint="resume without --verify; in later runs, a larger save_total_limit keeps older checkpoints",
        )
    return earlier[0]


def _find_changes(run: TrainingRun, checkpoint: Checkpoint) -> list[Problem]:
    manifest = checkpoint.manifest
    problems = list(find_changed_settings(manifest.learning, collect_learning_settings(run.plan)))
    pairs = (
        ("data", manifest.data_key, run.data_key),
        ("base weights", manifest.base, run.base_fingerprint),
        ("steps", manifest.num_steps, run.num_steps),
    )
    problems += [
        Problem(where=where, what=f"{before} before, {now} now") for where, before, now in pairs if before != now
    ]
    if not problems and compute_progress(run, manifest.step).chain != manifest.chain:
        problems.append(Problem(where="order", what="this run would have trained other rows in the steps so far"))
    return problems
