"""A comparison as Markdown: for a pull request, an issue, a note."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.compare.model import Comparison, Series
from launcher.compare.words import (
    MISSING,
    format_figure,
    format_seconds,
    format_shares,
    format_value,
)
from launcher.metrics import GRAD_NORM, LEARNING_RATE
from launcher.prose import inline

_NOT_TOLD = (GRAD_NORM, LEARNING_RATE)  # by numbers, nobody reads them
_POINTS = 8  # of a curve, in its table


def render_markdown(comparison: Comparison) -> str:
    parts = ["<!-- made by launcher compare -->", f"# {inline(comparison.title)}", f"As of {comparison.made_at}."]
    parts += _render_cautions(comparison)
    parts += ["## Final figures", _render_figures(comparison), comparison.about_best]
    parts += ["## Curves", *_render_curves(comparison)]
    parts += _render_shares(comparison)
    parts += _render_settings(comparison)
    if comparison.skipped:
        parts += ["## Left out", "\n".join(f"- {inline(one.place)}: {inline(one.why)}" for one in comparison.skipped)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _render_cautions(comparison: Comparison) -> Iterator[str]:
    if comparison.cautions:
        yield "## What does not compare"
        yield "\n".join(
            f"- **{inline(one.title)}** (spoils: {', '.join(one.spoils)}): {inline(one.detail)}"
            for one in comparison.cautions
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
    yield "Each at up to eight steps from the first to the last; of long runs, the mean around that step."
    for chart in comparison.charts:
        if chart.metric in _NOT_TOLD:
            continue
        rows = []
        for run in comparison.runs:
            series = next((one for one in run.series if one.metric == chart.metric), None)
            if series is not None:
                rows.append([inline(run.name), *_pick_points(series, chart.unit)])
        width = max(len(row) for row in rows)
        head = ["run", *(str(number + 1) for number in range(width - 1))]
        yield f"### {inline(chart.title[0].upper() + chart.title[1:])}"
        yield _render_table(head, [row + [""] * (width - len(row)) for row in rows], num_words=1)
    yield comparison.about_left_out


def _pick_points(series: Series, unit: str) -> list[str]:
    last = len(series.step) - 1
    places = sorted({round(number * last / (_POINTS - 1)) for number in range(_POINTS)})
    values = ((series.step[place], series.mean[place]) for place in places)
    return [f"{step:,}: {MISSING if value is None else format_value(value, unit)}" for step, value in values]


def _render_shares(comparison: Comparison) -> Iterator[str]:
    told = [run for run in comparison.runs if run.shares]
    if told:
        yield "## Where the time went"
        yield "\n".join(
            f"- {inline(run.name)}: {format_shares(run.shares)}; "
            f"together {format_seconds(sum(share.seconds for share in run.shares))}"
            f"{'' if run.shares_are_recorded else ' (added up from steps and evaluations)'}"
            for run in told
        )


def _render_settings(comparison: Comparison) -> Iterator[str]:
    yield "## Settings that differ"
    if comparison.settings:
        head = ["setting", *(inline(run.name) for run in comparison.runs)]
        rows = [
            [f"{inline(one.key)} ({one.section})", *(MISSING if v is None else inline(v) for v in one.values)]
            for one in comparison.settings
        ]
        yield _render_table(head, rows, num_words=len(head))
    yield f"{comparison.num_equal_settings:,} settings are the same in all runs."


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]], num_words: int) -> str:
    """The first columns are words, the others numbers, set to the right."""
    rule = ["---" if column < num_words else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
