"""Result of an A/B test: metrics of each variant, verdicts, changed decisions and caveats, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Literal

from launcher.bench.ab_test import Block, BlockSize, Measurements
from launcher.bench.bootstrap import estimate_ratio, format_verdict
from launcher.bench.variants import ChangedDecision, Variant, Variation, list_changes
from launcher.bench.worker import Timing
from launcher.core.frozen_model import Frozen
from launcher.core.markdown import inline, table
from launcher.core.units import format_percent
from launcher.hardware.model import format_hardware


class VariantMetrics(Frozen):
    """Metrics of one variant of an A/B test: medians over its blocks; of the peak memory, the maximum."""

    label: str
    tokens_per_second: float
    step_seconds: float
    steps: int  # timed, per block
    sequences_per_step: int
    mfu: float | None
    peak_gib: float | None
    utilization: float | None
    watts: float | None
    attention: str  # the backend that ran
    compiled: str
    build_seconds: float


class Comparison(Frozen):
    """Speed of the first variant relative to another, in tokens/s."""

    label: str
    other: str
    ratio: float
    low: float
    high: float
    text: str


class BenchResult(Frozen):
    """Result of an A/B test of training speed: the content of result.json."""

    schema_version: Literal[2] = 2
    expert: str
    key: str
    hardware: str
    on_gpu: bool
    repeats: int
    reuses_processes: bool
    variants: tuple[VariantMetrics, ...]
    verdicts: tuple[Comparison, ...]
    changes: tuple[ChangedDecision, ...]
    notes: tuple[str, ...]
    blocks: tuple[Block, ...]


def make_result(
    variation: Variation,
    variants: Sequence[Variant],
    measurements: Measurements,
    notes: Sequence[str],
) -> BenchResult:
    """Compute the result of an A/B test from its measured blocks."""
    plan = variants[0].plan
    blocks = sorted(measurements.blocks, key=lambda block: block.round)
    timings = [[block.timing for block in blocks if block.variant == index] for index in range(len(variants))]
    return BenchResult(
        expert=plan.expert,
        key=variation.key,
        hardware=format_hardware(plan.hardware),
        on_gpu=plan.hardware.gpu is not None,
        repeats=max(block.round for block in blocks),
        reuses_processes=measurements.reuses_processes,
        variants=tuple(
            _summarize(variant, timings[index], measurements, index) for index, variant in enumerate(variants)
        ),
        verdicts=tuple(make_verdicts([variant.label for variant in variants], timings)),
        changes=list_changes(variants),
        notes=(*notes, *_list_anomalies(variants, measurements, timings)),
        blocks=tuple(measurements.blocks),
    )


def make_verdicts(labels: Sequence[str], timings: Sequence[Sequence[Timing]]) -> list[Comparison]:
    """Compare the speed of the first variant with that of each other variant, with confidence intervals."""
    speeds = [[timing.tokens_per_second for timing in block_timings] for block_timings in timings]
    verdicts = []
    for other, other_speeds in zip(labels[1:], speeds[1:], strict=True):
        interval = estimate_ratio(speeds[0], other_speeds)
        text = format_verdict(labels[0], other, interval)
        verdicts.append(Comparison(label=labels[0], other=other, text=text, **asdict(interval)))
    return verdicts


def _summarize(variant: Variant, timings: Sequence[Timing], measurements: Measurements, index: int) -> VariantMetrics:
    ready = measurements.ready[index]
    return VariantMetrics(
        label=variant.label,
        tokens_per_second=median(timing.tokens_per_second for timing in timings),
        step_seconds=median(median(timing.seconds) for timing in timings),
        steps=len(timings[0].seconds),
        sequences_per_step=variant.plan.batch.global_batch_size,
        mfu=_median_or_none([timing.mfu for timing in timings]),
        peak_gib=max((timing.peak_gib for timing in timings if timing.peak_gib is not None), default=None),
        utilization=_median_or_none([timing.utilization for timing in timings]),
        watts=_median_or_none([timing.watts for timing in timings]),
        attention=ready.attention,
        compiled=ready.compiled,
        build_seconds=ready.seconds,
    )


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def list_caveats(
    variants: Sequence[Variant], block_size: BlockSize, stores: Sequence[str], num_sequences: int
) -> list[str]:
    """Return notes on differences in data, number of sequences and batch size between variants, before measuring."""
    notes = []
    plans = [variant.plan for variant in variants]
    if len(set(stores)) > 1:
        notes.append("the change affects the data: variants train different sequences; compare tokens/s")
    elif len({(plan.schedule.seed, plan.batch.group_by_length) for plan in plans}) > 1:
        notes.append("the change affects the order of the data: variants train different sequences")
    elif not block_size.is_exact:
        notes.append("the global batches have no small common multiple: some variants train a few sequences more")
    total = block_size.warmup_sequences + block_size.timed_sequences
    if total > num_sequences:
        notes.append(f"the data has {num_sequences:,} sequences, a block {total:,}: sequences repeat within a block")
    sizes = [plan.batch.global_batch_size for plan in plans]
    if len(set(sizes)) > 1:
        text = ", ".join(f"{variant.label}: {size}" for variant, size in zip(variants, sizes, strict=True))
        notes.append(f"sequences per step differ ({text}): compare tokens/s, not step times")
    return notes


def _list_anomalies(
    variants: Sequence[Variant], measurements: Measurements, timings: Sequence[Sequence[Timing]]
) -> list[str]:
    """Return notes on variants that ran another attention backend than planned, or that skipped steps."""
    notes = []
    for index, variant in enumerate(variants):
        planned, active = variant.plan.attention.backend, measurements.ready[index].attention
        if planned != active:
            notes.append(f"{variant.label}: attention backend {planned} cannot run here; measured {active}")
        num_skipped = sum(timing.num_skipped for timing in timings[index])
        if num_skipped:
            notes.append(f"{variant.label}: {num_skipped} steps skipped (non-finite loss or gradients)")
    return notes


def table_header(result: BenchResult) -> tuple[str, ...]:
    """Return the column titles of the table of variants."""
    memory = "peak memory" if result.on_gpu else "peak memory (process)"
    return ("", "tokens/s", "ms per step", "sequences per step", "MFU", memory, "GPU utilization")


def table_rows(result: BenchResult) -> list[tuple[str, ...]]:
    """Return one table row per variant of an A/B test."""
    return [
        (
            variant.label,
            format_rate(variant.tokens_per_second),
            f"{1000 * variant.step_seconds:,.1f}",
            str(variant.sequences_per_step),
            *format_gpu_columns(variant.mfu, variant.peak_gib, variant.utilization),
        )
        for variant in result.variants
    ]


def format_gpu_columns(mfu: float | None, peak_gib: float | None, utilization: float | None) -> tuple[str, str, str]:
    """Format MFU, peak memory and GPU utilization; a dash for an unknown value."""
    return (
        "-" if mfu is None else format_percent(mfu),
        "-" if peak_gib is None else f"{peak_gib:.2f} GiB",
        "-" if utilization is None else f"{100 * utilization:.0f} %",
    )


def format_rate(tokens_per_second: float) -> str:
    """Format tokens/s as an integer, or with one decimal below 100."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:,.1f}"


def describe_method(result: BenchResult) -> str:
    """Return one line of text on how an A/B test was measured: blocks, steps per block, processes, statistics."""
    steps = [str(variant.steps) for variant in result.variants]
    per_block = " / ".join(steps) if len(set(steps)) > 1 else steps[0]
    processes = "one process per variant" if result.reuses_processes else "a new process for every block"
    blocks = f"{result.repeats} interleaved blocks of {per_block} steps per variant"
    return f"{blocks}; {processes}; medians, 95 % bootstrap interval"


def render_markdown(result: BenchResult) -> str:
    """Render the report of an A/B test as Markdown: the content of report.md."""
    parts = [
        f"# {inline(result.expert)}: {inline(result.key)}",
        f"On {inline(result.hardware)}. {describe_method(result)}.",
        table(table_header(result), _inline(table_rows(result))),
        *(f"**{inline(verdict.text)}**" for verdict in result.verdicts),
    ]
    if result.changes:
        header = ("decision of the plan", *(inline(variant.label) for variant in result.variants))
        rows = [(change.name, *(value or "-" for value in change.values)) for change in result.changes]
        parts += ["Plan decisions that differ:", table(header, _inline(rows))]
    if result.notes:
        parts.append("\n".join(f"- note: {inline(note)}" for note in result.notes))
    return "\n\n".join(parts) + "\n"


def _inline(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[inline(cell) for cell in row] for row in rows]
