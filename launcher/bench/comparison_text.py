"""A comparison as rows of a table, as lines, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.bench.result import BenchResult, SideFigures
from launcher.prose import inline, table
from launcher.units import format_percent

_DASH = "-"


def make_head(result: BenchResult) -> tuple[str, ...]:
    memory = "peak memory" if result.on_gpu else "peak memory (process)"
    return ("", "tokens/s", "ms a step", "sequences a step", "MFU", memory, "GPU busy")


def make_rows(result: BenchResult) -> list[tuple[str, ...]]:
    return [_make_row(side) for side in result.sides]


def _make_row(side: SideFigures) -> tuple[str, ...]:
    return (
        side.label,
        format_rate(side.tokens_per_second),
        f"{1000 * side.step_seconds:,.1f}",
        str(side.sequences_per_step),
        _DASH if side.mfu is None else format_percent(side.mfu),
        _DASH if side.peak_gib is None else f"{side.peak_gib:.2f} GiB",
        _DASH if side.utilization is None else f"{100 * side.utilization:.0f} %",
    )


def format_rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:,.1f}"


def describe_method(result: BenchResult) -> str:
    steps = " / ".join(str(side.steps) for side in result.sides) if _differ(result) else str(result.sides[0].steps)
    how = "one process a side, the others asleep" if result.is_kept else "a new process for every block"
    return f"{result.repeats} blocks of {steps} steps a side, in turn; {how}; medians, 95 % bootstrap interval"


def _differ(result: BenchResult) -> bool:
    return len({side.steps for side in result.sides}) > 1


def render_markdown(result: BenchResult) -> str:
    parts = [
        f"# {inline(result.expert)}: {inline(result.key)}",
        f"On {inline(result.hardware)}. {describe_method(result)}.",
        table(make_head(result), _inline(make_rows(result))),
        *(f"**{inline(versus.words)}**" for versus in result.verdicts),
    ]
    if result.changes:
        head = ("decision of the plan", *(inline(side.label) for side in result.sides))
        rows = [(change.name, *(value or _DASH for value in change.values)) for change in result.changes]
        parts += ["What differs between the sides:", table(head, _inline(rows))]
    if result.notes:
        parts.append("\n".join(f"- note: {inline(note)}" for note in result.notes))
    return "\n\n".join(parts) + "\n"


def _inline(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[inline(cell) for cell in row] for row in rows]
