"""Report sections on measured results: speed, time, memory, losses, stability."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from launcher.analysis.compare.curves import make_shares
from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.summary_metrics import compute_cost, compute_data_wait, compute_wall_clock
from launcher.analysis.report.run_metrics import (
    LossCurve,
    collect_loss_curve,
    compute_energy_wh,
    compute_max,
    compute_median,
    draw_sparkline,
    format_metric,
    get_last,
)
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
)
from launcher.runs.record import Outcome, RunRecord

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
    if (temperature := compute_max(steps, metrics.GPU_TEMPERATURE)) is not None:
        yield "GPU temperature, maximum", format_metric(metrics.GPU_TEMPERATURE, temperature)
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
    summary = f"Goodput {format_percent(goodput)}: share of the wall-clock time spent on training steps that count."
    return f"## Where the time went\n\n{summary}\n\n{table(('', 'time', 'of the run'), rows)}"


def render_memory(record: RunRecord) -> str:
    """Render predicted and measured peak memory."""
    plan, on_gpu = record.plan, record.plan.hardware.gpu is not None
    peak = compute_max(record.steps, metrics.PEAK_ALLOCATED_GIB)
    predicted = get_last(record.steps, metrics.PREDICTED_GIB)
    predicted = bytes_to_gib(plan.memory.allocated_bytes) if predicted is None else predicted
    rows = [("predicted, per rank", format_gib(predicted * GIB))]
    if peak is not None:
        rows.append(("measured, maximum", format_gib(peak * GIB)))
        rows.append(("prediction error", f"{100 * (predicted / peak - 1):+.1f} %"))
    if (reserved := compute_max(record.steps, metrics.PEAK_RESERVED_GIB)) is not None:
        rows.append(("reserved by the allocator, maximum", format_gib(reserved * GIB)))
    if (retries := compute_max(record.steps, metrics.ALLOC_RETRIES)) is not None:
        rows.append(("allocation retries", f"{retries:,.0f}"))
    title = "GPU memory" if on_gpu else "RAM"
    rows.append((title, f"{format_gib(plan.memory.device_bytes)}, {format_gib(plan.memory.headroom_bytes)} headroom"))
    reason = "no step finished" if not record.steps else "peaks are measured on GPUs only"
    missing = "" if peak is not None else f"\n\nNot measured: {reason}."
    return f"## Memory\n\n{table(('', ''), rows)}{missing}"


def render_learning(record: RunRecord) -> str:
    """Render training and validation loss."""
    trained = collect_loss_curve(record.rows, metrics.TRAIN_LOSS)
    held_out = collect_loss_curve(record.rows, metrics.EVAL_LOSS)
    if trained is None and held_out is None:
        return f"## Learning\n\n{_NOTHING}"
    rows = [
        _format_curve(METRICS_BY_NAME[name].title, curve)
        for name, curve in ((metrics.TRAIN_LOSS, trained), (metrics.EVAL_LOSS, held_out))
        if curve is not None
    ]
    losses = table(("", "first", "last", "best", "best step", "curve"), rows)
    lines = ["" if held_out is not None else "No validation loss was measured."]
    if record.outcome is not None and record.outcome.ended_because:
        lines.append(f"Ended before the last step: {inline(record.outcome.ended_because)}.")
    tokens = get_last(record.rows, metrics.TOKENS_SEEN)
    if tokens is not None and record.rows:
        lines.append(f"{tokens:,.0f} tokens seen, {record.rows[-1].epoch:.2f} epochs.")
    return "\n\n".join(("## Learning", losses, *filter(None, lines)))


def _format_curve(title: str, curve: LossCurve) -> tuple[str, ...]:
    numbers = (f"{value:.4f}" for value in (curve.first, curve.last, curve.best))
    sparkline = draw_sparkline(curve.values) if len(curve.values) > 1 else ""
    return (title, *numbers, f"{curve.best_step:,}", sparkline)


def render_stability(record: RunRecord) -> str:
    """Render skipped steps, gradient norm, OOM fallbacks and restarts."""
    outcome = record.outcome
    lines = list(_describe_steps(record.steps)) if record.steps else []
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
