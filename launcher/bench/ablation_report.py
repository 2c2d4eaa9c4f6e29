"""Report of an ablation as table, Markdown and plot: each stage's speedup over the baseline, cumulative and alone."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import Literal

from launcher.bench.ablation import StageRecord
from launcher.bench.ablation_stages import Mode
from launcher.bench.result import format_gpu_columns, format_rate
from launcher.core.frozen_model import Frozen
from launcher.core.markdown import inline, table
from launcher.hardware.model import format_hardware
from launcher.plan.model import Plan

_MAX_DRIFT = 0.05  # of the baseline from the first to the last measurement; beyond it small gains mean nothing
INSTALL_HINT = "no plot: matplotlib is not installed; pip install 'expert-launcher[plot]'"
_CUMULATIVE, _LAUNCHER, _ALONE, _SLOWER = "#1d5fd0", "#0a7045", "#7da6e2", "#c2570c"

HEADER = (
    "stage",
    "tokens/s",
    "x baseline",
    "alone: tokens/s",
    "alone: x baseline",
    "MFU",
    "peak memory",
    "GPU utilization",
)


class Ablation(Frozen):
    """Results of an ablation with its model, hardware and batch size: the content of ablation.json."""

    schema_version: Literal[2] = 2
    expert: str
    base: str
    hardware: str
    on_gpu: bool
    sequences_per_step: int
    sequence_length: int
    warmup_steps: int
    timed_steps: int
    records: tuple[StageRecord, ...]
    notes: tuple[str, ...]


class StageGain(Frozen):
    """Speedup of an ablation stage over the baseline, on top of all earlier stages and alone."""

    title: str
    record: StageRecord
    alone: StageRecord | None  # None for the baseline and the launcher's own loop
    gain: float | None  # speed relative to the baseline
    alone_gain: float | None


def make_ablation(
    plan: Plan, records: Sequence[StageRecord], warmup_steps: int, timed_steps: int, notes: Sequence[str]
) -> Ablation:
    """Combine the results of an ablation with the model, hardware and batch size that they were measured on."""
    return Ablation(
        expert=plan.expert,
        base=plan.base.name,
        hardware=format_hardware(plan.hardware),
        on_gpu=plan.hardware.gpu is not None,
        sequences_per_step=plan.batch.global_batch_size,
        sequence_length=plan.batch.sequence_length,
        warmup_steps=warmup_steps,
        timed_steps=timed_steps,
        records=tuple(records),
        notes=(*notes, *list_notes(records)),
    )


def get_speed(record: StageRecord | None) -> float | None:
    """Return the tokens/s of an ablation stage; None if it was not measured."""
    return None if record is None or record.timing is None else record.timing.tokens_per_second


def _find_record(records: Sequence[StageRecord], key: str, mode: Mode) -> StageRecord | None:
    return next((record for record in records if (record.key, record.mode) == (key, mode)), None)


def compute_gains(ablation: Ablation) -> list[StageGain]:
    """Compute each ablation stage's speedup over the baseline; stages without a measurement are included, with None."""
    baseline = get_speed(_find_record(ablation.records, "baseline", "cumulative"))
    gains = []
    for record in ablation.records:
        if record.mode != "cumulative":
            continue
        alone = None if record.key == "baseline" else _find_record(ablation.records, record.key, "alone")
        gain, alone_gain = (
            None if speed is None or baseline is None else speed / baseline
            for speed in (get_speed(record), get_speed(alone))
        )
        gains.append(StageGain(title=record.title, record=record, alone=alone, gain=gain, alone_gain=alone_gain))
    return gains


def list_notes(records: Sequence[StageRecord]) -> list[str]:
    """Return the notes of all measurements, after a warning if the repeated baseline differs by more than 5 %."""
    notes = []
    first, last = (get_speed(_find_record(records, "baseline", mode)) for mode in ("cumulative", "alone"))
    if first is not None and last is not None and abs(last / first - 1) > _MAX_DRIFT:
        notes.append(
            f"the speed of the machine changed: the baseline ran at {format_rate(first)} tokens/s first and at "
            f"{format_rate(last)} last; gains smaller than this difference are not significant"
        )
    notes += [
        f"{record.title} ({record.mode}): {record.timing.note}"
        for record in records
        if record.timing is not None and record.timing.note
    ]
    return notes


def table_rows(ablation: Ablation) -> list[tuple[str, ...]]:
    """Return one table row per ablation stage, without those that are unavailable with this plan."""
    return [_make_row(gain) for gain in compute_gains(ablation) if gain.record.status != "unavailable"]


def _make_row(stage: StageGain) -> tuple[str, ...]:
    timing = stage.record.timing
    return (
        stage.title,
        _format_speed(stage.record),
        _format_gain(stage.gain),
        "" if stage.alone is None else _format_speed(stage.alone),
        "" if stage.alone is None else _format_gain(stage.alone_gain),
        *(
            format_gpu_columns(None, None, None)
            if timing is None
            else format_gpu_columns(timing.mfu, timing.peak_gib, timing.utilization)
        ),
    )


def _format_speed(record: StageRecord) -> str:
    speed = get_speed(record)
    return record.status if speed is None else format_rate(speed)


def _format_gain(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}"


def list_missing(ablation: Ablation) -> list[str]:
    """Return one line for each ablation stage that was not measured, with the reason."""
    unavailable = [
        f"unavailable: {gain.title}: {gain.record.reason}"
        for gain in compute_gains(ablation)
        if gain.record.status == "unavailable"
    ]
    failed = [
        f"{record.title} ({record.mode}): {record.status}: {record.reason}"
        for record in ablation.records
        if record.status not in ("measured", "unavailable")
    ]
    return unavailable + failed


def describe(ablation: Ablation) -> str:
    """Return the base model, hardware, batch size and number of steps of an ablation as one line of text."""
    size = f"{ablation.sequences_per_step} sequences of {ablation.sequence_length:,} tokens per step"
    warmup = "1 warm-up step" if ablation.warmup_steps == 1 else f"{ablation.warmup_steps} warm-up steps"
    return (
        f"{ablation.base} on {ablation.hardware}; {size}, the same rows in every stage; "
        f"median of {ablation.timed_steps} steps after {warmup}"
    )


def render_markdown(ablation: Ablation) -> str:
    """Render the report of an ablation as Markdown: the content of ablation.md."""
    rows = [[inline(cell) for cell in row] for row in table_rows(ablation)]
    parts = [f"# Ablation: {inline(ablation.expert)}", f"{inline(describe(ablation))}.", table(HEADER, rows)]
    if remarks := [*list_missing(ablation), *(f"note: {note}" for note in ablation.notes)]:
        parts.append("\n".join(f"- {inline(line)}" for line in remarks))
    return "\n\n".join(parts) + "\n"


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def render_png(ablation: Ablation) -> bytes:
    """Render the plot of an ablation as PNG; needs matplotlib."""
    from matplotlib.figure import Figure

    gains = compute_gains(ablation)
    figure = Figure(figsize=(13, 1.6 + 0.42 * len(gains)), layout="constrained")
    figure.suptitle(f"Ablation: {ablation.expert}\n{describe(ablation)}", fontsize=10)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    rows = range(len(gains))
    speeds = [get_speed(gain.record) or 0.0 for gain in gains]
    left.barh(rows, speeds, color=[_LAUNCHER if gain.record.config is None else _CUMULATIVE for gain in gains])
    left.set_yticks(rows, [gain.title for gain in gains])
    left.invert_yaxis()
    left.set_xlabel("tokens/s with all stages above")
    alone = [gain.alone_gain or 0.0 for gain in gains]
    right.barh(rows, alone, color=[_ALONE if gain >= 1 else _SLOWER for gain in alone])
    right.axvline(1.0, color="gray", linewidth=1)
    right.set_xlabel("alone: speed relative to the baseline")
    for row, gain in enumerate(gains):
        left.annotate(_label(gain), (speeds[row], row), (4, 0), textcoords="offset points", va="center", fontsize=8)
        if gain.alone is not None and gain.alone.status != "unavailable":
            text = gain.alone.status if gain.alone_gain is None else f"x{gain.alone_gain:.2f}"
            right.annotate(text, (alone[row], row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    for axes in (left, right):
        axes.margins(x=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _label(gain: StageGain) -> str:
    speed, timing = get_speed(gain.record), gain.record.timing
    if speed is None or timing is None:
        return gain.record.status
    ratio = "" if gain.gain is None else f"  x{gain.gain:.2f}"
    memory = "" if timing.peak_gib is None else f"  {timing.peak_gib:.1f} GiB"
    return f"{format_rate(speed)}{ratio}{memory}"
