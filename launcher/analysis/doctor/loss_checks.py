"""Check the loss: non-finite steps, spikes, divergence, no progress, missing evaluation, overfitting."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

from launcher.analysis.doctor.findings import Finding, Status
from launcher.analysis.doctor.run_helpers import (
    compute_thirds,
    format_steps,
    prepare_command,
    report_run,
    train_command,
)
from launcher.core import metrics
from launcher.core.metrics import SPIKE_WINDOW, StepMetrics, find_values, is_loss_spike
from launcher.plan.model import Plan
from launcher.runs.record import RunRecord

_MAX_STEPS = 10_000  # the last ones of a long run
_MAX_SPIKE_SHARE = 0.01  # of the steps
_MAX_SKIPPED_SHARE = 0.01
_DIVERGES = 1.05  # loss of the last third over the lowest third
_MIN_TREND_STEPS = 24
_SHORT_STEPS, _RISES = 6, 1.1  # of a shorter run: loss of the last third over the first
_FIRST_STEPS = 10
# No progress: the loss of the last third is at least this share of the first steps'; a problem after 200 steps.
_FLAT_STEPS, _SURELY_FLAT_STEPS, _FLAT = 50, 200, 0.995
_EVALUATED_STEPS = 100  # longer runs should have a validation loss
_OVERFITS = 1.05  # last validation loss over the best


def check_loss(record: RunRecord) -> Iterator[Finding]:
    """Check training and validation loss of a run."""
    steps = record.steps
    yield from _check_nonfinite(record, steps)
    yield from _check_spikes(record, steps)
    yield from _check_trend(record, steps)
    yield from _check_evaluation(record)


def _stabilize(plan: Plan) -> tuple[str, ...]:
    """Return settings for more stable training: half the learning rate, and a warm-up if the plan has almost none."""
    rate = f"training.config.learning_rate={plan.optimizer.learning_rate / 2:g}"
    has_warm_up = (plan.schedule.warmup_ratio or 0.0) >= 0.03 or (plan.schedule.warmup_steps or 0) >= 20
    return (rate,) if has_warm_up else (rate, "training.config.warmup_ratio=0.05")


def _check_nonfinite(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    # Loss scaling finds its scale by overflowing steps: only a non-finite loss is bad there.
    counts_skipped = not record.plan.precision.loss_scaling
    broken = [
        step
        for step in steps
        if not math.isfinite(step.values[metrics.TRAIN_LOSS])
        or (counts_skipped and (step.get(metrics.SKIPPED) or 0.0) > 0)
    ]
    if not broken:
        return
    status: Status = "problem" if len(broken) > max(1, _MAX_SKIPPED_SHARE * len(steps)) else "note"
    yield report_run(
        "unstable loss",
        status,
        f"{len(broken)} of {len(steps)} steps were skipped ({format_steps(broken)}): non-finite loss or gradients",
        "training is about to diverge, or rows are broken",
        f"{train_command(record, *_stabilize(record.plan))}; the console names the rows",
    )


def _find_spikes(steps: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Return the steps with a loss spike, by the rule that training warns by."""
    spikes: list[StepMetrics] = []
    recent: deque[float] = deque(maxlen=SPIKE_WINDOW)
    for step in steps[-_MAX_STEPS:]:
        loss = step.get(metrics.TRAIN_LOSS)
        if loss is None or not math.isfinite(loss):
            continue
        if is_loss_spike(loss, recent):
            spikes.append(step)
        recent.append(loss)
    return spikes


def _check_spikes(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    spikes = _find_spikes(steps)
    if not spikes:
        return
    yield report_run(
        "unstable loss",
        "problem" if len(spikes) > max(1, _MAX_SPIKE_SHARE * len(steps)) else "note",
        f"the loss spiked {len(spikes)} times ({format_steps(spikes)})"
        if len(spikes) > 1
        else f"the loss spiked at {format_steps(spikes)}",
        "the learning rate is too high, or some rows are unlike the others",
        f"{train_command(record, *_stabilize(record.plan))}; the console names the rows",
    )


def _check_trend(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    losses = find_values(steps, metrics.TRAIN_LOSS)
    if len(losses) < _SHORT_STEPS:
        return
    parts = compute_thirds(losses)
    if len(losses) < _MIN_TREND_STEPS:
        if parts[-1] > _RISES * parts[0]:
            yield report_run.note(
                "loss",
                f"it rises: {parts[0]:.3f} over the first third of {len(losses)} steps, {parts[-1]:.3f} over the last",
                "the learning rate may be too high, but so few steps are weak evidence",
                train_command(record, *_stabilize(record.plan)),
            )
        return
    if parts[-1] > _DIVERGES * min(parts):
        yield report_run.problem(
            "unstable loss",
            f"it rises: {min(parts):.3f} before, {parts[-1]:.3f} over the last third",
            "training diverges",
            train_command(record, *_stabilize(record.plan)),
        )
        return
    first = median(losses[:_FIRST_STEPS])  # most progress is early: long runs are flat for most of their time
    if len(losses) >= _FLAT_STEPS and parts[-1] > _FLAT * first:
        yield report_run(
            "loss",
            "problem" if len(losses) >= _SURELY_FLAT_STEPS else "note",
            f"it does not fall: {first:.3f} over the first {_FIRST_STEPS} steps, {parts[-1]:.3f} over the last third",
            "nothing is learned: the learning rate is too low, or the loss mask is wrong",
            f"{train_command(record, f'training.config.learning_rate={2 * record.plan.optimizer.learning_rate:g}')}; "
            f"{prepare_command(record)} shows the loss mask",
        )


def _check_evaluation(record: RunRecord) -> Iterator[Finding]:
    held_out = find_values(record.evaluations, metrics.EVAL_LOSS)
    is_done = record.outcome is not None and record.outcome.status == "done"
    last = record.evaluations[-1] if record.evaluations else None
    if last is not None and not math.isfinite(last.values[metrics.EVAL_LOSS]):
        yield report_run.problem(
            "unstable loss",
            f"the validation loss after step {last.step:,} is not a number",
            "training diverged, or a validation row is broken",
            train_command(record, *_stabilize(record.plan)),
        )
        return
    if not held_out:
        if is_done and len(record.steps) >= _EVALUATED_STEPS:
            yield report_run.note(
                "quality",
                "unknown: no validation loss was computed",
                "the training loss says nothing about unseen rows",
                train_command(record, "training.config.evaluation_strategy=epoch"),
            )
        return
    best = min(held_out)
    keeps_best = record.plan.schedule.load_best_model_at_end
    rises_at_once = len(held_out) >= 2 and held_out[0] == best
    if held_out[-1] > _OVERFITS * best and (rises_at_once or (len(held_out) >= 3 and not keeps_best)):
        why = "training makes the model worse: the learning rate may be too high, or there are too few rows"
        keep = () if keeps_best else ("training.config.load_best_model_at_end=true",)
        yield report_run.note(
            "quality",
            f"the validation loss was {best:.3f} at its best and is {held_out[-1]:.3f} now",
            why if rises_at_once else "overfitting: the last weights are not the best ones",
            train_command(record, *keep, "training.config.early_stopping_patience=2"),
        )
