"""What a run measured, as Markdown: speed, time, memory, learning, stability."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from launcher import metrics
from launcher.metrics import METRICS_BY_NAME, StepMetrics
from launcher.prose import code, inline, table
from launcher.record import Outcome, RunRecord
from launcher.report.figures import (
    Course,
    draw_sparkline,
    find_course,
    find_data_wait,
    find_energy,
    find_goodput,
    find_highest,
    find_last,
    find_median,
    find_total_seconds,
    format_metric,
    format_seconds,
)
from launcher.units import GIB, bytes_to_gib, format_duration, format_gib, format_percent

_NOTHING = "No step was finished: nothing was measured."
_SECONDS_PER_HOUR = 3600.0


def render_speed(record: RunRecord) -> str:
    if not record.steps:
        return f"## Speed\n\n{_NOTHING}"
    steps = f"Medians of {len(record.steps):,} steps." if len(record.steps) > 1 else "Of one step."
    rows = [*_planned_speed(record), *((title, value, "", "") for title, value in _measured_speed(record))]
    head: tuple[str, ...] = ("", "measured", "planned", "measured against planned")
    width = 4 if any(planned for _, _, planned, _ in rows) else 2
    shown = table(head[:width], [row[:width] for row in rows])
    return f"## Speed\n\n{steps} The plan: {inline(record.plan.speed.confidence)}.\n\n{shown}"


def _planned_speed(record: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    speed, steps = record.plan.speed, record.steps
    pairs = (
        (metrics.TOKENS_PER_SECOND, speed.tokens_per_second),
        (metrics.DEVICE_MFU, speed.mfu),
        (metrics.STEP_SECONDS, speed.seconds_per_step),
    )
    for name, planned in pairs:
        measured = find_median(steps, name)
        if measured is not None:
            yield _compare(METRICS_BY_NAME[name].title, measured, planned, partial(format_metric, name))
    total = find_total_seconds(record)
    if total is not None:
        is_whole = record.outcome is not None and record.outcome.status == "done"
        yield _compare("the whole run", total, speed.total_seconds if is_whole else None, format_duration)


def _compare(
    title: str, measured: float, planned: float | None, format_value: Callable[[float], str]
) -> tuple[str, str, str, str]:
    if planned is None or not planned:
        return title, format_value(measured), "", ""
    return title, format_value(measured), format_value(planned), f"{100 * (measured / planned - 1):+.0f} %"


def _measured_speed(record: RunRecord) -> Iterator[tuple[str, str]]:
    steps = record.steps
    names = [metrics.TRAINED_TOKENS_PER_SECOND, metrics.SAMPLES_PER_SECOND]
    if record.plan.hardware.num_ranks > 1:
        names.append(metrics.DEVICE_TOKENS_PER_SECOND)
    names += [metrics.PACKING_EFFICIENCY, metrics.GPU_UTILIZATION, metrics.GPU_POWER_WATTS, metrics.JOULES_PER_TOKEN]
    for name in names:
        if (median := find_median(steps, name)) is not None:
            yield METRICS_BY_NAME[name].title, format_metric(name, median)
    if (hottest := find_highest(steps, metrics.GPU_TEMPERATURE)) is not None:
        yield "GPU temperature, highest", format_metric(metrics.GPU_TEMPERATURE, hottest)
    if (wait := find_data_wait(steps)) is not None:
        yield wait[0], f"{format_percent(wait[1])} of a step"
    if (energy := find_energy(steps)) is not None:
        yield "energy of the steps", f"{energy:,.1f} Wh" if energy < 1000 else f"{energy / 1000:,.2f} kWh"
    total, price = find_total_seconds(record), record.plan.speed.price_per_gpu_hour
    if total is not None and price is not None:
        hours = total / _SECONDS_PER_HOUR * record.plan.hardware.num_ranks
        cost = hours * price
        yield f"cost at {price:g} a GPU and hour", f"{cost:.2f}" if cost >= 0.01 else "under 0.01"


def render_time(record: RunRecord) -> str:
    """Empty where nobody counted."""
    parts, total = find_goodput(record), find_total_seconds(record)
    goodput = parts.pop(metrics.GOODPUT, None)
    if goodput is None:
        return ""
    rows = [
        (METRICS_BY_NAME[name].title, format_seconds(seconds), format_percent(seconds / total) if total else "")
        for name, seconds in parts.items()
        if seconds > 0
    ]
    told = f"Goodput {format_percent(goodput)}: so much of all time trained what counts."
    return f"## Where the time went\n\n{told}" + (f"\n\n{table(('', 'seconds', 'of the run'), rows)}" if rows else "")


def render_memory(record: RunRecord) -> str:
    plan, on_gpu = record.plan, record.plan.hardware.gpu is not None
    peak = find_highest(record.steps, metrics.PEAK_ALLOCATED_GIB)
    predicted = find_last(record.steps, metrics.PREDICTED_GIB)
    predicted = bytes_to_gib(plan.memory.allocated_bytes) if predicted is None else predicted
    rows = [("predicted, each rank", format_gib(predicted * GIB))]
    if peak is not None:
        rows.append(("measured, highest peak", format_gib(peak * GIB)))
        rows.append(("predicted against measured", f"{100 * (predicted / peak - 1):+.1f} %"))
    if (reserved := find_highest(record.steps, metrics.PEAK_RESERVED_GIB)) is not None:
        rows.append(("reserved by the allocator, highest", format_gib(reserved * GIB)))
    if (retries := find_highest(record.steps, metrics.ALLOC_RETRIES)) is not None:
        rows.append(("allocations that emptied the cache", f"{retries:,.0f}"))
    what = "of the card" if on_gpu else "of the machine"
    rows.append(
        (what, f"{format_gib(plan.memory.card_bytes)}, {format_gib(plan.memory.headroom_bytes)} kept as headroom")
    )
    why = "no step was finished" if not record.steps else "only GPUs count their peaks"
    missing = "" if peak is not None else f"\n\nNot measured: {why}."
    return f"## Memory\n\n{table(('', ''), rows)}{missing}"


def render_learning(record: RunRecord) -> str:
    trained = find_course(record.rows, metrics.TRAIN_LOSS)
    held_out = find_course(record.rows, metrics.EVAL_LOSS)
    if trained is None and held_out is None:
        return f"## Learning\n\n{_NOTHING}"
    rows = [
        _describe_course(METRICS_BY_NAME[name].title, course)
        for name, course in ((metrics.TRAIN_LOSS, trained), (metrics.EVAL_LOSS, held_out))
        if course is not None
    ]
    shown = table(("", "first", "last", "best", "of step", "course"), rows)
    lines = ["" if held_out is not None else "No held-out loss was measured."]
    if record.outcome is not None and record.outcome.ended_because:
        lines.append(f"It ended before its last step: {inline(record.outcome.ended_because)}.")
    seen = find_last(record.rows, metrics.TOKENS_SEEN)
    if seen is not None and record.rows:
        lines.append(f"{seen:,.0f} tokens seen, {record.rows[-1].epoch:.2f} epochs.")
    return "\n\n".join(("## Learning", shown, *filter(None, lines)))


def _describe_course(title: str, course: Course) -> tuple[str, ...]:
    numbers = (f"{value:.4f}" for value in (course.first, course.last, course.best))
    drawn = draw_sparkline(course.values) if len(course.values) > 1 else ""
    return (title, *numbers, f"{course.best_step:,}", drawn)


def render_stability(record: RunRecord) -> str:
    outcome = record.outcome
    lines = list(_describe_steps(record.steps)) if record.steps else []
    if outcome is not None:
        lines += [f"- a rung down, because memory ran out: {inline(rung)}" for rung in outcome.rungs]
        if not outcome.rungs:
            lines.append("- memory never ran out: no rung was taken")
        lines.append(f"- {_count_starts(outcome)}")
    told = "\n".join(lines) if lines else _NOTHING
    starts = f"\n\n{_render_attempts(outcome)}" if outcome is not None and len(outcome.attempts) > 1 else ""
    return f"## Stability\n\n{told}{starts}"


def _describe_steps(steps: Sequence[StepMetrics]) -> Iterator[str]:
    skipped = [row.step for row in steps if row.values.get(metrics.SKIPPED, 0.0) > 0]
    if any(metrics.SKIPPED in row.values for row in steps):
        named = f": {_name_steps(skipped)}" if skipped else ""
        yield f"- {len(skipped) or 'none'} of {len(steps):,} steps passed over{named}"
    bad = [row.step for row in steps if not math.isfinite(row.values[metrics.TRAIN_LOSS])]
    if bad:
        yield f"- losses that were no numbers: {_name_steps(bad)}"
    norms = [(norm, row.step) for row in steps if math.isfinite(norm := row.values.get(metrics.GRAD_NORM, math.nan))]
    median = find_median(steps, metrics.GRAD_NORM)
    if norms and median is not None:
        highest, step = max(norms)
        title = METRICS_BY_NAME[metrics.GRAD_NORM].title
        yield f"- {title}: median {median:.3g}, highest {highest:.3g} at step {step:,}"


def _name_steps(steps: Sequence[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:10])
    return f"step {shown}" + (f" and {len(steps) - 10:,} more" if len(steps) > 10 else "")


def _count_starts(outcome: Outcome) -> str:
    starts = len(outcome.attempts)
    return "started once" if starts <= 1 else f"started {starts:,} times"


def _render_attempts(outcome: Outcome) -> str:
    rows = [
        (
            f"{number:,}",
            code(attempt.started_at),
            "no word" if attempt.ended_at is None else code(attempt.ended_at),
            f"{attempt.from_step:,}",
            "" if attempt.steps_done is None else f"{attempt.steps_done:,}",
        )
        for number, attempt in enumerate(outcome.attempts, start=1)
    ]
    return table(("start", "began", "ended", "from step", "to step"), rows)
