"""Render a comparison as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.analysis.compare.model import Comparison, Series
from launcher.analysis.compare.value_text import (
    MISSING,
    format_figure,
    format_seconds,
    format_shares,
    format_value,
)
from launcher.core.markdown import inline
from launcher.core.metrics import GRAD_NORM, LEARNING_RATE

_OMITTED = (GRAD_NORM, LEARNING_RATE)  # not useful as numbers
_POINTS = 8  # per curve


def render_markdown(comparison: Comparison) -> str:
    """Render all sections."""
    parts = ["<!-- made by launcher compare -->", f"# {inline(comparison.title)}", f"As of {comparison.made_at}."]
    parts += _render_cautions(comparison)
    parts += ["## Results", _render_figures(comparison), comparison.about_best]
    parts += ["## Curves", *_render_curves(comparison)]
    parts += _render_shares(comparison)
    parts += _render_settings(comparison)
    if comparison.skipped:
        parts += ["## Skipped", "\n".join(f"- {inline(run.place)}: {inline(run.why)}" for run in comparison.skipped)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _render_cautions(comparison: Comparison) -> Iterator[str]:
    if comparison.cautions:
        yield "## Caveats"
        yield "\n".join(
            f"- **{inline(item.title)}** (affects {', '.join(item.spoils)}): {inline(item.detail)}"
            for item in comparison.cautions
        )


def _render_figures(comparison: Comparison) -> str:
    head = ["run", "status", "data", *(inline(figure.title) for figure in comparison.figures)]
    rows = [
        [
            inline(run.name),
            run.status,
            run.data_group or MISSING,
            *(format_figure(figure, index) for figure in comparison.figures),
        ]
        for index, run in enumerate(comparison.runs)
    ]
    return _render_table(head, rows, num_words=3)


def _render_curves(comparison: Comparison) -> Iterator[str]:
    yield "Up to eight steps per curve; for long runs, means around that step."
    for chart in comparison.charts:
        if chart.metric in _OMITTED:
            continue
        rows = []
        for run in comparison.runs:
            series = next((curve for curve in run.series if curve.metric == chart.metric), None)
            if series is not None:
                rows.append([inline(run.name), *_pick_points(series, chart.unit)])
        width = max(len(row) for row in rows)
        head = ["run", *(str(number + 1) for number in range(width - 1))]
        yield f"### {inline(chart.title[0].upper() + chart.title[1:])}"
        yield _render_table(head, [row + [""] * (width - len(row)) for row in rows], num_words=1)
    yield comparison.about_left_out


def _pick_points(series: Series, unit: str) -> list[str]:
    last = len(series.step) - 1
    indices = sorted({round(number * last / (_POINTS - 1)) for number in range(_POINTS)})
    values = ((series.step[index], series.mean[index]) for index in indices)
    return [f"{step:,}: {MISSING if value is None else format_value(value, unit)}" for step, value in values]


def _render_shares(comparison: Comparison) -> Iterator[str]:
    recorded = [run for run in comparison.runs if run.shares]
    if recorded:
        yield "## Time breakdown"
        yield "\n".join(
            f"- {inline(run.name)}: {format_shares(run.shares)}; "
            f"total {format_seconds(sum(share.seconds for share in run.shares))}"
            f"{'' if run.shares_are_recorded else ' (sum of steps and evaluations)'}"
            for run in recorded
        )


def _render_settings(comparison: Comparison) -> Iterator[str]:
    yield "## Settings that differ"
    if comparison.settings:
        head = ["setting", *(inline(run.name) for run in comparison.runs)]
        rows = [
            [f"{inline(item.key)} ({item.section})", *(MISSING if v is None else inline(v) for v in item.values)]
            for item in comparison.settings
        ]
        yield _render_table(head, rows, num_words=len(head))
    yield f"{comparison.num_equal_settings:,} settings are equal in all runs."


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]], num_words: int) -> str:
    """Render a table whose columns after the first `num_words` are right-aligned."""
    rule = ["---" if column < num_words else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
