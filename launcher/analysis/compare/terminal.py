"""Render a comparison for a terminal: small plots and tables, readable without colour and in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from launcher.analysis.compare.model import Chart, ComparedRun, Comparison, Series
from launcher.analysis.compare.text_plots import Curve, render_plot, render_sparkline
from launcher.analysis.compare.value_text import (
    BEST,
    MISSING,
    format_figure,
    format_seconds,
    format_shares,
    format_value,
)
from launcher.core.errors import escape
from launcher.core.metrics import TRAIN_LOSS

_COLOURS = ("blue", "yellow", "green", "magenta", "red", "cyan", "bright_blue", "bright_yellow")
_MAX_NAME, _MAX_VALUE = 28, 40
_PLOT_HEIGHT = 11
_MAX_OVERLAID = len(_COLOURS)  # more curves in one plot are unreadable
_GAP = 2


def render_terminal(comparison: Comparison, width: int, *, is_unicode: bool = True) -> Text:
    """Render all sections in lines of at most `width` cells, if the names allow it."""
    page = Text()
    for part in (
        _wrap(escape(comparison.title), width, "", "bold"),
        _wrap(f"made by launcher compare, as of {comparison.made_at}", width, "", "dim"),
        _show_cautions(comparison, width),
        _show_charts(comparison, width, is_unicode),
        _show_figures(comparison, width, is_unicode),
        _show_shares(comparison, width),
        _show_settings(comparison, width),
    ):
        for line in part:
            page.append_text(line)
            page.append("\n")
    return page


def _heading(text: str) -> Iterator[Text]:
    yield Text("")
    yield Text(text, style="bold underline")


def _show_cautions(comparison: Comparison, width: int) -> Iterator[Text]:
    for caution in comparison.cautions:
        yield Text("")
        sign = "! " if caution.level == "warning" else "  "
        style = "bold yellow" if caution.level == "warning" else "bold"
        yield from _wrap(f"{sign}{caution.title} (affects {', '.join(caution.spoils)})", width, "", style)
        yield from _wrap(escape(caution.detail), width, "  ")


def _wrap(text: str, width: int, indent: str, style: str = "") -> Iterator[Text]:
    line = indent
    for word in text.split(" "):
        if cell_len(line) + cell_len(word) > width and line.strip():
            yield Text(line.rstrip(), style=style)
            line = indent
        line += word + " "
    if line.strip():
        yield Text(line.rstrip(), style=style)


def _show_charts(comparison: Comparison, width: int, is_unicode: bool) -> Iterator[Text]:
    steps = [step for run in comparison.runs for series in run.series for step in series.step]
    if not steps:
        yield from _heading("No run has logged metrics yet")
        return
    x_range = (float(min(steps)), float(max(steps)))
    for chart in comparison.charts:
        drawn = [
            (index, run, series)
            for index, run in enumerate(comparison.runs)
            for series in run.series
            if series.metric == chart.metric
        ]
        yield from _heading(f"{chart.title}, step {min(steps):,} to {max(steps):,}")
        is_overlaid = (chart.is_sparse or chart.metric == TRAIN_LOSS) and len(drawn) <= _MAX_OVERLAID
        if is_overlaid and is_unicode and any(len(series.step) > 1 for _, _, series in drawn):
            yield from _show_plot(chart, drawn, width, x_range)
        yield from _show_sparklines(chart, drawn, width, x_range, is_unicode)
    if comparison.left_out:
        yield Text("")
        yield from _wrap(comparison.about_left_out, width, "")


def _show_plot(
    chart: Chart, drawn: Sequence[tuple[int, ComparedRun, Series]], width: int, x_range: tuple[float, float]
) -> Iterator[Text]:
    low, high = _value_range([series for _, _, series in drawn])
    labels = {0: format_value(high, chart.unit), _PLOT_HEIGHT - 1: format_value(low, chart.unit)}
    margin = max(map(len, labels.values()))
    curves = [Curve(xs=series.step, ys=series.mean) for _, _, series in drawn]
    field = render_plot(curves, max(20, width - margin - 3), _PLOT_HEIGHT, x_range, (low, high))
    for row, cells in enumerate(field):
        line = Text(f"{labels.get(row, ''):>{margin}} │", style="dim")
        for cell in cells:
            line.append(cell.sign, style="" if cell.curve is None else f"not dim {_colour(drawn[cell.curve][0])}")
        yield line


def _show_sparklines(
    chart: Chart,
    drawn: Sequence[tuple[int, ComparedRun, Series]],
    width: int,
    x_range: tuple[float, float],
    is_unicode: bool,
) -> Iterator[Text]:
    """Show one sparkline per run on a common scale, with its first and last value."""
    bounds = _value_range([series for _, _, series in drawn])
    arrow = "→" if is_unicode else "->"
    ends = [
        f"{_end(series, chart.unit, first=True)} {arrow} {_end(series, chart.unit, first=False)}"
        for _, _, series in drawn
    ]
    names = [escape(run.name) for _, run, _ in drawn]
    name_width = min(_MAX_NAME, max(map(cell_len, names)))
    room = max(10, width - name_width - max(map(cell_len, ends)) - 2 * _GAP)
    for (index, _, series), name, end in zip(drawn, names, ends, strict=True):
        curve = Curve(xs=series.step, ys=series.mean)
        line = Text(_fit(name, name_width) + " " * _GAP, style=_colour(index))
        line.append(render_sparkline(curve, room, x_range, bounds, is_unicode=is_unicode))
        yield line.append(" " * _GAP + end, style="default")


def _end(series: Series, unit: str, *, first: bool) -> str:
    values = [value for value in series.mean if value is not None]
    return format_value(values[0 if first else -1], unit)


def _value_range(all_series: Sequence[Series]) -> tuple[float, float]:
    values = [value for series in all_series for value in series.mean if value is not None]
    return min(values), max(values)


def _show_figures(comparison: Comparison, width: int, is_unicode: bool) -> Iterator[Text]:
    """Show one row per result and one column per run, in several blocks if needed."""
    yield from _heading("Results")
    star = BEST if is_unicode else "*"
    rows: list[tuple[str, list[str]]] = [("status", [run.status for run in comparison.runs])]
    if len({run.data_group for run in comparison.runs}) > 1:
        rows.append(("data", [run.data_group or "unknown" for run in comparison.runs]))
    for figure in comparison.figures:
        cells = [format_figure(figure, index).replace(BEST, star) for index in range(len(comparison.runs))]
        rows.append((figure.title, cells))
    yield from _show_columns(comparison.runs, rows, width)
    yield from _wrap(comparison.about_best.replace(BEST, star), width, "")


def _show_settings(comparison: Comparison, width: int) -> Iterator[Text]:
    yield from _heading("Settings that differ")
    rows = [
        (escape(item.key), [MISSING if v is None else _cut(escape(v), _MAX_VALUE) for v in item.values])
        for item in comparison.settings
    ]
    if rows:
        yield from _show_columns(comparison.runs, rows, width)
    yield Text(f"{comparison.num_equal_settings:,} settings are equal in all runs.")


def _show_columns(runs: Sequence[ComparedRun], rows: Sequence[tuple[str, Sequence[str]]], width: int) -> Iterator[Text]:
    first = min(_MAX_VALUE, max(cell_len(title) for title, _ in rows))
    names = [_cut(escape(run.name), _MAX_NAME) for run in runs]
    widths = [max(cell_len(name), *(cell_len(cells[at]) for _, cells in rows)) for at, name in enumerate(names)]
    for block in _fill_blocks(widths, width - first):
        head = Text(" " * first, style="bold")
        for at in block:
            head.append(" " * _GAP + _fit(names[at], widths[at], right=True), style=_colour(at))
        yield head
        for title, cells in rows:
            line = Text(_fit(title, first), style="default")
            for at in block:
                text = _fit(cells[at], widths[at], right=True)
                is_best = cells[at].endswith((BEST, " *"))
                line.append(" " * _GAP + text, style="bold green" if is_best else "")
            yield line
        if block[-1] + 1 < len(runs):
            yield Text("")


def _fill_blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Group columns into blocks that fit the width."""
    blocks: list[list[int]] = [[]]
    used = 0
    for at, wide in enumerate(widths):
        if blocks[-1] and used + wide + _GAP > room:
            blocks.append([])
            used = 0
        blocks[-1].append(at)
        used += wide + _GAP
    return blocks


def _show_shares(comparison: Comparison, width: int) -> Iterator[Text]:
    recorded = [run for run in comparison.runs if run.shares]
    if recorded:
        yield from _heading("Time breakdown")
    for run in recorded:
        total = format_seconds(sum(share.seconds for share in run.shares))
        basis = "" if run.shares_are_recorded else " (sum of steps and evaluations)"
        yield Text(f"{escape(run.name)}: {total}{basis}")
        yield from _wrap(format_shares(run.shares), width, "  ")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 3) + "..."


def _fit(text: str, width: int, *, right: bool = False) -> str:
    """Pad or cut text to the width of its column in terminal cells."""
    cut = _cut(text, width)
    space = " " * (width - cell_len(cut))
    return space + cut if right else cut + space
