"""What the loss says: steps passed over, jumps, a loss that rises or does not fall, and one that is never looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from launcher import metrics
from launcher.doctor.findings import Finding, Status
from launcher.doctor.series import parts_of
from launcher.doctor.words import anew, tell
from launcher.metrics import StepMetrics, find_values
from launcher.plan.model import Plan
from launcher.record import RunRecord

# A jump, as the training itself tells it: above the median of the last steps by so many median deviations, and such a
# part of it.
_RECENT, _ENOUGH = 64, 16
_MOST_STEPS = 10_000  # of a long run, the last ones
_SPREADS, _SHARE = 8.0, 0.2
_MANY_JUMPS = 0.01  # of the steps
_MANY_SKIPPED = 0.01
_RISES = 1.05
_TREND_STEPS = 24
_FIRST = 10
_FLAT_STEPS, _SURELY_FLAT_STEPS, _FLAT = 50, 200, 0.995
_EVALUATED_STEPS = 100  # beyond so many nobody should train without looking at held-out rows
_OVERFITS = 1.05


def judge_learning(record: RunRecord) -> Iterator[Finding]:
    steps = record.steps
    yield from _judge_skipped(record, steps)
    yield from _judge_jumps(record, steps)
    yield from _judge_course(record, steps)
    yield from _judge_evaluations(record)


def _calm_down(plan: Plan) -> tuple[str, ...]:
    """Half the rate, and a warm-up where there is next to none."""
    rate = f"training.config.learning_rate={plan.optimizer.learning_rate / 2:g}"
    has_warm_up = (plan.schedule.warmup_ratio or 0.0) >= 0.03 or (plan.schedule.warmup_steps or 0) >= 20
    return (rate,) if has_warm_up else (rate, "training.config.warmup_ratio=0.05")


def _judge_skipped(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    # Loss scaling finds its scale by steps that overflow: only a loss that is no number is bad there.
    counts_skipped = not record.plan.precision.loss_scaling
    numbers = [
        step.step
        for step in steps
        if not math.isfinite(step.values[metrics.TRAIN_LOSS])
        or (counts_skipped and (step.get(metrics.SKIPPED) or 0.0) > 0)
    ]
    if not numbers:
        return
    status: Status = "problem" if len(numbers) > max(1, _MANY_SKIPPED * len(steps)) else "note"
    yield tell(
        "unstable loss",
        status,
        f"{len(numbers)} of {len(steps)} steps were passed over ({_list(numbers)}): loss or gradients are no numbers",
        "the training is at the edge of coming apart, or rows are broken",
        f"{anew(record, *_calm_down(record.plan))}; the console names the rows",
    )


def _list(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return f"step{'s' if len(numbers) > 1 else ''} {shown}{', …' if len(numbers) > 4 else ''}"


def find_jumps(steps: Sequence[StepMetrics]) -> list[int]:
    jumps: list[int] = []
    recent: list[float] = []
    for step in steps[-_MOST_STEPS:]:
        loss = step.get(metrics.TRAIN_LOSS)
        if loss is None or not math.isfinite(loss):
            continue
        if len(recent) >= _ENOUGH:
            usual = median(recent)
            spread = median(abs(other - usual) for other in recent)
            if loss > usual + max(_SPREADS * spread, _SHARE * usual):
                jumps.append(step.step)
        recent = [*recent, loss][-_RECENT:]
    return jumps


def _judge_jumps(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    jumps = find_jumps(steps)
    if not jumps:
        return
    yield tell(
        "unstable loss",
        "problem" if len(jumps) > max(1, _MANY_JUMPS * len(steps)) else "note",
        f"the loss jumped {len(jumps)} times ({_list(jumps)})"
        if len(jumps) > 1
        else f"the loss jumped at step {jumps[0]}",
        "a rate that is too high, or rows unlike the others",
        f"{anew(record, *_calm_down(record.plan))}; the console names the rows",
    )


def _judge_course(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    losses = find_values(steps, metrics.TRAIN_LOSS)
    if len(losses) < _TREND_STEPS:
        return
    parts = [median(part) for part in parts_of(losses, 3)]
    if parts[-1] > _RISES * min(parts):
        yield tell(
            "unstable loss",
            "problem",
            f"it rises: {min(parts):.3f} before, {parts[-1]:.3f} over the last third",
            "the training diverges: what it learnt is being lost",
            anew(record, *_calm_down(record.plan)),
        )
        return
    first = median(losses[:_FIRST])  # most is learnt early: long runs are flat for most of their time
    if len(losses) >= _FLAT_STEPS and parts[-1] > _FLAT * first:
        yield tell(
            "loss",
            "problem" if len(losses) >= _SURELY_FLAT_STEPS else "note",
            f"it does not fall: {first:.3f} over the first {_FIRST} steps, {parts[-1]:.3f} over the last third",
            "nothing is learnt: too low a rate, or answers that are not trained on",
            f"{anew(record, f'training.config.learning_rate={2 * record.plan.optimizer.learning_rate:g}')}; "
            f"launcher prepare {record.plan.expert} shows what is trained on",
        )


def _judge_evaluations(record: RunRecord) -> Iterator[Finding]:
    held_out = find_values(record.evaluations, metrics.EVAL_LOSS)
    is_done = record.outcome is not None and record.outcome.status == "done"
    if not held_out:
        if is_done and len(record.steps) >= _EVALUATED_STEPS:
            yield tell(
                "quality",
                "note",
                "not known: no held-out loss was ever computed",
                "a training loss says nothing about rows that the model has not seen",
                anew(record, "training.config.evaluation_strategy=epoch"),
            )
        return
    best = min(held_out)
    keeps_best = record.plan.schedule.load_best_model_at_end
    if len(held_out) >= 3 and held_out[-1] > _OVERFITS * best and not keeps_best:
        yield tell(
            "quality",
            "note",
            f"the held-out loss was {best:.3f} at its best and is {held_out[-1]:.3f} now",
            "it learns its rows by heart: the last weights are not the best ones",
            anew(record, "training.config.load_best_model_at_end=true", "training.config.early_stopping_patience=2"),
        )
