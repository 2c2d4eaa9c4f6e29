"""Report sections on measured results: speed, time, memory, losses, stability."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from launcher.analysis.compare.curves import make_shares
from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.summary_metrics import compute_cost, compute_data_wait, compute_wall_clock
from launcher.core import metrics
from launcher.core.markdown import code, inline, table
from launcher.core.metrics import METRICS_BY_NAME, StepMetrics, find_values
from launcher.core.units import (
    GIB,
    bytes_to_gib,
    format_cost,
    format_duration,
    format_gib,
    format_percent,
    format_seconds,
    format_value,
)
from launcher.runs.record import Outcome, RunRecord, compute_median

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_JOULES_PER_WH = 3600.0
_NOT_FINITE = "not finite"
_NOTHING = "Nothing was measured: no step finished."


def render_speed(record: RunRecord, facts: RunFacts) -> str:
    """Render measured speed next to the planned one."""
    if not record.steps:
        return f"## Speed\n\n{_NOTHING}"
    steps = f"Medians of {len(record.steps):,} steps." if len(record.steps) > 1 else "Only one step was measured."
    more = ((title, value, "", "") for title, value in _measured_speed(record, facts))
    rows = [*_planned_speed(record, facts), *more]
    head: tuple[str, ...] = ("", "measured", "planned", "difference")
    width = 4 if any(planned for _, _, planned, _ in rows) else 2
    speeds = table(head[:width], [row[:width] for row in rows])
    return f"## Speed\n\n{steps} Accuracy of the plan: {inline(record.plan.speed.confidence)}.\n\n{speeds}"


def _planned_speed(record: RunRecord, facts: RunFacts) -> Iterator[tuple[str, str, str, str]]:
    speed, steps = record.plan.speed, record.steps
    pairs = (
        (metrics.TOKENS_PER_SECOND, speed.tokens_per_second),
        (metrics.DEVICE_MFU, speed.mfu),
        (metrics.STEP_SECONDS, speed.seconds_per_step),
    )
    for name, planned in pairs:
        measured = compute_median(steps, name)
        if measured is not None:
            yield _compare(METRICS_BY_NAME[name].title, measured, planned, partial(format_metric, name))
    total = compute_wall_clock(facts)
    if total is not None:
        is_complete = record.outcome is not None and record.outcome.status == "done"
        in_steps = sum(find_values(steps, metrics.STEP_SECONDS))
        yield _compare("all steps", in_steps, speed.total_seconds if is_complete else None, format_duration)
        yield _compare("with start-up, evaluation and checkpoints", total, None, format_duration)


def _compare(
    title: str, measured: float, planned: float | None, format_value: Callable[[float], str]
) -> tuple[str, str, str, str]:
    if planned is None or not planned:
        return title, format_value(measured), "", ""
    return title, format_value(measured), format_value(planned), f"{100 * (measured / planned - 1):+.0f} %"


def _measured_speed(record: RunRecord, facts: RunFacts) -> Iterator[tuple[str, str]]:
    steps = record.steps
    names = [metrics.TRAINED_TOKENS_PER_SECOND, metrics.SAMPLES_PER_SECOND]
    if record.plan.hardware.num_ranks > 1:
        names.append(metrics.DEVICE_TOKENS_PER_SECOND)
    names += [metrics.PACKING_EFFICIENCY, metrics.GPU_UTILIZATION, metrics.GPU_POWER_WATTS, metrics.JOULES_PER_TOKEN]
    for name in names:
        if (median := compute_median(steps, name)) is not None:
            yield METRICS_BY_NAME[name].title, format_metric(name, median)
    if temperatures := find_values(steps, metrics.GPU_TEMPERATURE):
        yield "GPU temperature, maximum", format_metric(metrics.GPU_TEMPERATURE, max(temperatures))
    if (wait := compute_data_wait(facts)) is not None:
        yield "data wait", f"{format_percent(wait)} of the time of all steps"
    if (energy := compute_energy_wh(steps)) is not None:
        yield "energy of all steps", f"{energy:,.1f} Wh" if energy < 1000 else f"{energy / 1000:,.2f} kWh"
    if (cost := compute_cost(facts)) is not None:
        speed = record.plan.speed
        yield f"cost at {speed.format_price()}", format_cost(cost, speed.currency)


def render_time(facts: RunFacts) -> str:
    """Render the goodput breakdown; empty if it was not recorded."""
    shares, are_recorded = make_shares(facts)
    goodput = facts.last(metrics.GOODPUT)
    if goodput is None or not are_recorded:
        return ""
    total = sum(share.seconds for share in shares)
    rows = [(share.part, format_seconds(share.seconds), format_percent(share.seconds / total)) for share in shares]
    what = "share of the wall-clock time spent on training steps that were not skipped or repeated"
    summary = f"Goodput {format_percent(goodput)}: {what}."
    return f"## Where the time went\n\n{summary}\n\n{table(('', 'time', 'of the run'), rows)}"


def render_memory(record: RunRecord) -> str:
    """Render predicted and measured peak memory."""
    plan, on_gpu = record.plan, record.plan.hardware.gpu is not None
    peaks = find_values(record.steps, metrics.PEAK_ALLOCATED_GIB)
    predictions = find_values(record.steps, metrics.PREDICTED_GIB)
    predicted = predictions[-1] if predictions else bytes_to_gib(plan.memory.allocated_bytes)
    rows = [("predicted, per rank", format_gib(predicted * GIB))]
    if peaks:
        rows.append(("measured, maximum", format_gib(max(peaks) * GIB)))
        rows.append(("prediction error", f"{100 * (predicted / max(peaks) - 1):+.1f} %"))
    if reserved := find_values(record.steps, metrics.PEAK_RESERVED_GIB):
        rows.append(("reserved by the allocator, maximum", format_gib(max(reserved) * GIB)))
    if retries := find_values(record.steps, metrics.ALLOC_RETRIES):
        rows.append(("allocation retries", f"{max(retries):,.0f}"))
    title = "GPU memory" if on_gpu else "RAM"
    rows.append((title, f"{format_gib(plan.memory.device_bytes)}, {format_gib(plan.memory.headroom_bytes)} headroom"))
    reason = "no step finished" if not record.steps else "peaks are measured on GPUs only"
    missing = "" if peaks else f"\n\nNot measured: {reason}."
    return f"## Memory\n\n{table(('', ''), rows)}{missing}"


def render_learning(record: RunRecord) -> str:
    """Render training and validation loss."""
    rows = [row for name in (metrics.TRAIN_LOSS, metrics.EVAL_LOSS) for row in _format_curve(record, name)]
    if not rows:
        return f"## Learning\n\n{_NOTHING}"
    losses = table(("", "first", "last", "best", "best step", "curve"), rows)
    lines = [] if record.evaluations else ["No validation loss was measured."]
    if record.outcome is not None and record.outcome.ended_because:
        lines.append(f"Ended before the last step: {inline(record.outcome.ended_because)}.")
    if tokens := find_values(record.rows, metrics.TOKENS_SEEN):
        lines.append(f"{tokens[-1]:,.0f} tokens seen, {record.rows[-1].epoch:.2f} epochs.")
    return "\n\n".join(("## Learning", losses, *lines))


def _format_curve(record: RunRecord, name: str) -> Iterator[tuple[str, ...]]:
    """Yield one table row with the first, last and best value of a loss and its curve; none if not measured."""
    logged = [(row.values[name], row.step) for row in record.rows if name in row.values]
    points = [(value, step) for value, step in logged if math.isfinite(value)]
    if not logged:
        return
    first, last = (f"{value:.4f}" if math.isfinite(value) else _NOT_FINITE for value, _ in (logged[0], logged[-1]))
    if points:
        values = [value for value, _ in points]
        best, best_step = min(points)
        curve = draw_sparkline(values) if values[1:] else ""
        yield METRICS_BY_NAME[name].title, first, last, f"{best:.4f}", f"{best_step:,}", curve
    else:
        yield METRICS_BY_NAME[name].title, first, last, _NOT_FINITE, "", ""


def render_stability(record: RunRecord) -> str:
    """Render skipped steps, gradient norm, OOM fallbacks and restarts."""
    outcome = record.outcome
    lines = list(_describe_steps(record.steps)) if record.steps else []
    if broken := [row.step for row in record.evaluations if not math.isfinite(row.values[metrics.EVAL_LOSS])]:
        lines.append(f"- non-finite validation losses: {_list_steps(broken)}")
    if outcome is not None:
        lines += [f"- fallback after CUDA out of memory: {inline(fallback)}" for fallback in outcome.oom_fallbacks]
        if not outcome.oom_fallbacks:
            lines.append("- no out-of-memory fallback")
        starts = len(outcome.attempts)
        lines.append("- started once" if starts <= 1 else f"- started {starts:,} times")
    summary = "\n".join(lines) if lines else _NOTHING
    attempts = f"\n\n{_render_attempts(outcome)}" if outcome is not None and len(outcome.attempts) > 1 else ""
    return f"## Stability\n\n{summary}{attempts}"


def _describe_steps(steps: Sequence[StepMetrics]) -> Iterator[str]:
    skipped = [row.step for row in steps if row.values.get(metrics.SKIPPED, 0.0) > 0]
    if any(metrics.SKIPPED in row.values for row in steps):
        named = f": {_list_steps(skipped)}" if skipped else ""
        yield f"- {len(skipped) or 'none'} of {len(steps):,} steps skipped{named}"
    nonfinite = [row.step for row in steps if not math.isfinite(row.values[metrics.TRAIN_LOSS])]
    if nonfinite:
        yield f"- non-finite losses: {_list_steps(nonfinite)}"
    norms = [(norm, row.step) for row in steps if math.isfinite(norm := row.values.get(metrics.GRAD_NORM, math.nan))]
    median = compute_median(steps, metrics.GRAD_NORM)
    if norms and median is not None:
        highest, step = max(norms)
        title = METRICS_BY_NAME[metrics.GRAD_NORM].title
        yield f"- {title}: median {median:.3g}, maximum {highest:.3g} at step {step:,}"


def _list_steps(steps: Sequence[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:10])
    return f"step {shown}" + (f" and {len(steps) - 10:,} more" if len(steps) > 10 else "")


def _render_attempts(outcome: Outcome) -> str:
    rows = [
        (
            f"{number:,}",
            code(attempt.started_at),
            "unknown" if attempt.ended_at is None else code(attempt.ended_at),
            f"{attempt.from_step:,}",
            "" if attempt.steps_done is None else f"{attempt.steps_done:,}",
        )
        for number, attempt in enumerate(outcome.attempts, start=1)
    ]
    return table(("attempt", "started", "ended", "from step", "to step"), rows)


def compute_energy_wh(rows: Iterable[StepMetrics]) -> float | None:
    """Return the energy of all steps that measured it, in watt-hours."""
    names = (metrics.JOULES_PER_TOKEN, metrics.TOKENS_PER_SECOND, metrics.STEP_SECONDS)
    factors = [[row.values.get(name, math.nan) for name in names] for row in rows]
    joules = [math.prod(values) for values in factors if all(map(math.isfinite, values))]
    return sum(joules) / _JOULES_PER_WH if joules else None


def draw_sparkline(values: Sequence[float]) -> str:
    """Draw values as block characters, averaged over equal parts if there are many."""
    width = min(len(values), _SPARK_WIDTH)
    bounds = [round(part * len(values) / width) for part in range(width + 1)] if width else []
    means = [statistics.fmean(values[start:end]) for start, end in pairwise(bounds)]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def format_metric(name: str, value: float) -> str:
    """Format a value in the metric's unit; unlike in tables of several runs, rates are not abbreviated."""
    unit = METRICS_BY_NAME[name].unit
    if unit in ("", "share", "s", "GiB", "J"):
        return format_value(value, unit)
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
