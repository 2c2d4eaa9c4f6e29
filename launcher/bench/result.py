"""A comparison that was measured: figures of each side, verdicts, what else differs, and what spoils it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from launcher.bench.comparing import Effort, Measured
from launcher.bench.interval import Interval, estimate_ratio
from launcher.bench.order import Course
from launcher.bench.sides import Side, find_changes
from launcher.bench.values import Block, Timing
from launcher.bench.varying import Variation
from launcher.bench.verdict import format_verdict
from launcher.hardware import format_hardware
from launcher.values import Frozen


class SideFigures(Frozen):
    label: str
    tokens_per_second: float  # medians over the blocks
    step_seconds: float
    steps: int  # timed, in a block
    sequences_per_step: int
    mfu: float | None
    peak_gib: float | None
    utilization: float | None
    watts: float | None
    attention: str  # that ran
    compiled: str
    build_seconds: float


class Versus(Frozen):
    """The speed of a side to that of the first, by tokens a second."""

    label: str
    other: str
    ratio: float
    low: float
    high: float
    words: str


class ChangedDecision(Frozen):
    name: str
    values: tuple[str | None, ...]
    reasons: tuple[str | None, ...]


class BenchResult(Frozen):
    schema_version: Literal[1] = 1
    expert: str
    key: str
    hardware: str
    on_gpu: bool
    repeats: int
    is_kept: bool
    sides: tuple[SideFigures, ...]
    verdicts: tuple[Versus, ...]
    changes: tuple[ChangedDecision, ...]
    notes: tuple[str, ...]
    blocks: tuple[Block, ...]


def make_result(
    variation: Variation, sides: Sequence[Side], measured: Measured, effort: Effort, notes: Sequence[str]
) -> BenchResult:
    plan = sides[0].plan
    timings = [_of_side(measured.blocks, place) for place in range(len(sides))]
    figures = tuple(_make_figures(side, timings[place], measured, place) for place, side in enumerate(sides))
    return BenchResult(
        expert=plan.expert,
        key=variation.key,
        hardware=format_hardware(plan.hardware),
        on_gpu=plan.hardware.gpu is not None,
        repeats=effort.repeats,
        is_kept=measured.is_kept,
        sides=figures,
        verdicts=tuple(make_verdicts([side.label for side in sides], timings)),
        changes=tuple(
            ChangedDecision(name=change.name, values=change.values, reasons=change.reasons)
            for change in find_changes(tuple(sides))
        ),
        notes=(*notes, *_find_spoilers(sides, measured, timings)),
        blocks=tuple(measured.blocks),
    )


def _of_side(blocks: Sequence[Block], side: int) -> list[Timing]:
    """In the order of the rounds."""
    return [block.timing for block in sorted(blocks, key=lambda block: block.round) if block.side == side]


def make_verdicts(labels: Sequence[str], timings: Sequence[Sequence[Timing]]) -> list[Versus]:
    """Of the first to each other one."""
    speeds = [[timing.tokens_per_second for timing in of_side] for of_side in timings]
    verdicts = []
    for label, other in zip(labels[1:], speeds[1:], strict=True):
        interval: Interval = estimate_ratio(speeds[0], other)
        words = format_verdict(labels[0], label, interval)
        verdicts.append(
            Versus(
                label=labels[0], other=label, ratio=interval.ratio, low=interval.low, high=interval.high, words=words
            )
        )
    return verdicts


def _make_figures(side: Side, timings: Sequence[Timing], measured: Measured, place: int) -> SideFigures:
    ready = measured.ready[place]
    return SideFigures(
        label=side.label,
        tokens_per_second=median(timing.tokens_per_second for timing in timings),
        step_seconds=median(timing.step_seconds for timing in timings),
        steps=len(timings[0].seconds),
        sequences_per_step=side.plan.batch.global_batch_size,
        mfu=_find_median([timing.mfu for timing in timings]),
        peak_gib=max((timing.peak_gib for timing in timings if timing.peak_gib is not None), default=None),
        utilization=_find_median([timing.utilization for timing in timings]),
        watts=_find_median([timing.watts for timing in timings]),
        attention=ready.attention,
        compiled=ready.compiled,
        build_seconds=ready.seconds,
    )


def _find_median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def find_notes(sides: Sequence[Side], course: Course, stores: Sequence[str], num_sequences: int) -> list[str]:
    """What makes the sides less than equal, known before anything is measured."""
    notes = []
    if len(set(stores)) > 1:
        notes.append("the change makes other data: sides do not train the same sequences; compare tokens/s")
    elif len({side.plan.schedule.seed for side in sides}) > 1 or _is_reordered(sides):
        notes.append("the change makes another order: sides do not train the same sequences")
    elif not course.is_exact:
        notes.append("global batches that fit no common block: some sides train a few sequences more")
    total = course.warm_sequences + course.timed_sequences
    if total > num_sequences:
        notes.append(f"the data has {num_sequences:,} sequences, a block {total:,}: they come more than once")
    sizes = [side.plan.batch.global_batch_size for side in sides]
    if len(set(sizes)) > 1:
        told = ", ".join(f"{side.label}: {size}" for side, size in zip(sides, sizes, strict=True))
        notes.append(f"sequences a step differ ({told}): compare tokens/s, not steps")
    return notes


def _is_reordered(sides: Sequence[Side]) -> bool:
    return len({side.plan.batch.group_by_length for side in sides}) > 1


def _find_spoilers(sides: Sequence[Side], measured: Measured, timings: Sequence[Sequence[Timing]]) -> list[str]:
    """What was seen while it was measured."""
    notes = []
    for place, side in enumerate(sides):
        planned, ran = side.plan.attention.backend, measured.ready[place].attention
        if planned != ran:
            notes.append(f"{side.label}: the attention backend {planned} cannot run here, {ran} was measured")
        skipped = sum(timing.num_skipped for timing in timings[place])
        if skipped:
            notes.append(f"{side.label}: {skipped} steps were no numbers, and updated nothing")
    return notes
