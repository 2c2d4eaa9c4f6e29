"""A ladder that was climbed, as figures: each rung on top of the others and alone, against the unoptimised loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from launcher.bench.comparison_text import format_rate
from launcher.bench.ladder import RungRecord
from launcher.bench.rungs import Stack
from launcher.hardware import format_hardware
from launcher.plan.model import Plan
from launcher.prose import inline, table
from launcher.units import format_percent
from launcher.values import Frozen

_DASH = "-"
_DRIFT = 0.05  # of the unoptimised loop from beginning to end: more, and small gains are none

HEAD = ("rung", "tokens/s", "x before", "alone: tokens/s", "alone: x before", "MFU", "peak memory", "GPU busy")


class Ladder(Frozen):
    """On disk: ladder.json."""

    schema_version: Literal[1] = 1
    expert: str
    base: str
    hardware: str
    on_gpu: bool
    sequences_per_step: int
    sequence_length: int
    warm_steps: int
    timed_steps: int
    records: tuple[RungRecord, ...]
    notes: tuple[str, ...]


class Step(Frozen):
    """A rung, both ways."""

    title: str
    record: RungRecord
    alone: RungRecord | None  # None: it has none, as the first and the last
    gain: float | None  # speed to that of `before`
    alone_gain: float | None


def make_ladder(
    plan: Plan, records: Sequence[RungRecord], warm_steps: int, timed_steps: int, notes: Sequence[str]
) -> Ladder:
    return Ladder(
        expert=plan.expert,
        base=plan.base.name,
        hardware=format_hardware(plan.hardware),
        on_gpu=plan.hardware.gpu is not None,
        sequences_per_step=plan.batch.global_batch_size,
        sequence_length=plan.batch.sequence_length,
        warm_steps=warm_steps,
        timed_steps=timed_steps,
        records=tuple(records),
        notes=(*notes, *find_notes(records)),
    )


def find_record(records: Sequence[RungRecord], key: str, stack: Stack) -> RungRecord | None:
    return next((record for record in records if (record.key, record.stack) == (key, stack)), None)


def find_speed(record: RungRecord | None) -> float | None:
    return None if record is None or record.timing is None else record.timing.tokens_per_second


def make_steps(ladder: Ladder) -> list[Step]:
    """All rungs, in order; those that are not here too."""
    before = find_speed(find_record(ladder.records, "before", "cumulative"))
    steps = []
    for record in ladder.records:
        if record.stack != "cumulative":
            continue
        alone = None if record.key == "before" else find_record(ladder.records, record.key, "alone")
        gain, alone_gain = (_divide(find_speed(one), before) for one in (record, alone))
        steps.append(Step(title=record.title, record=record, alone=alone, gain=gain, alone_gain=alone_gain))
    return steps


def _divide(speed: float | None, before: float | None) -> float | None:
    return None if speed is None or before is None else speed / before


def find_notes(records: Sequence[RungRecord]) -> list[str]:
    notes = []
    first, again = (find_speed(find_record(records, "before", stack)) for stack in ("cumulative", "alone"))
    if first is not None and again is not None and abs(again / first - 1) > _DRIFT:
        notes.append(
            f"the machine drifted: `before` made {format_rate(first)} tokens/s at the beginning and "
            f"{format_rate(again)} at the end; gains smaller than that say nothing"
        )
    notes += [
        f"{record.title} ({record.stack}): {record.timing.note}"
        for record in records
        if record.timing is not None and record.timing.note
    ]
    return notes


def make_rows(ladder: Ladder) -> list[tuple[str, ...]]:
    """Of what was measured, or tried."""
    return [_make_row(step) for step in make_steps(ladder) if step.record.status != "not here"]


def _make_row(step: Step) -> tuple[str, ...]:
    timing = step.record.timing
    return (
        step.title,
        _format_speed(step.record),
        _format_gain(step.gain),
        "" if step.alone is None else _format_speed(step.alone),
        "" if step.alone is None else _format_gain(step.alone_gain),
        _DASH if timing is None or timing.mfu is None else format_percent(timing.mfu),
        _DASH if timing is None or timing.peak_gib is None else f"{timing.peak_gib:.2f} GiB",
        _DASH if timing is None or timing.utilization is None else f"{100 * timing.utilization:.0f} %",
    )


def _format_speed(record: RungRecord) -> str:
    speed = find_speed(record)
    return record.status if speed is None else format_rate(speed)


def _format_gain(gain: float | None) -> str:
    return _DASH if gain is None else f"{gain:.2f}"


def list_missing(ladder: Ladder) -> list[str]:
    """What was not measured, and why."""
    told = [f"not here: {s.title}: {s.record.reason}" for s in make_steps(ladder) if s.record.status == "not here"]
    failed = [
        f"{record.title} ({record.stack}): {record.status}: {record.reason}"
        for record in ladder.records
        if record.status not in ("measured", "not here")
    ]
    return told + failed


def describe(ladder: Ladder) -> str:
    size = f"{ladder.sequences_per_step} sequences of {ladder.sequence_length:,} tokens a step"
    return (
        f"{ladder.base} on {ladder.hardware}; {size}, the same rows on every rung; "
        f"the median of {ladder.timed_steps} steps behind {ladder.warm_steps} warm ones"
    )


def render_markdown(ladder: Ladder) -> str:
    rows = [[inline(cell) for cell in row] for row in make_rows(ladder)]
    parts = [f"# The ladder: {inline(ladder.expert)}", f"{inline(describe(ladder))}.", table(HEAD, rows)]
    told = [*list_missing(ladder), *(f"note: {note}" for note in ladder.notes)]
    if told:
        parts.append("\n".join(f"- {inline(line)}" for line in told))
    return "\n\n".join(parts) + "\n"
