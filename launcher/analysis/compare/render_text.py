"""Render a comparison as Markdown, or as tables for a terminal, readable without color and in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.analysis.compare.model import Comparison, Figure, Series
from launcher.analysis.compare.verdict import format_verdict
from launcher.core.errors import escape
from launcher.core.markdown import inline
from launcher.core.metrics import GRAD_NORM, LEARNING_RATE
from launcher.core.units import format_cost, format_percent, format_seconds, format_value

_MISSING, _BEST = "-", "★"
_OMITTED = (GRAD_NORM, LEARNING_RATE)  # not useful as numbers
_POINTS = 8  # per curve
_MAX_WIDTH, _GAP = 40, 2  # of a column of the terminal


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


_Item = tuple[str, str]  # emphasized words, and text
_Section = tuple[str, list[str | list[_Item] | _Grid]]


def _list_sections(comparison: Comparison) -> Iterator[_Section]:
    if comparison.verdicts:
        lines = [format_verdict(comparison, verdict) for verdict in comparison.verdicts]
        yield "Verdict", [comparison.about_verdicts, lines]
    if comparison.cautions:
        affected = [f" (affects {', '.join(item.spoils)})" if item.spoils else "" for item in comparison.cautions]
        items = [
            (item.title, f"{text}: {item.detail}") for item, text in zip(comparison.cautions, affected, strict=True)
        ]
        yield "Caveats", [items]
    yield "Results", [_make_results(comparison), comparison.about_best]
    intro = "Up to eight steps per curve; for long runs, means around that step."
    curves = [*_make_curves(comparison)]
    yield "Curves", [intro if curves else "No run has logged metrics yet.", *curves, comparison.about_left_out]
    if any(run.shares for run in comparison.runs):
        yield "Time breakdown", [[*_list_breakdowns(comparison)]]
    equal = f"{comparison.num_equal_settings:,} settings are equal in all runs."
    yield "Settings that differ", [*_make_settings(comparison), equal]
    if comparison.skipped:
        yield "Skipped", [[(run.place, f": {run.why}") for run in comparison.skipped]]


def _make_results(comparison: Comparison) -> _Grid:
    rows = [["status", *(run.status for run in comparison.runs)]]
    if len({run.data_group for run in comparison.runs}) > 1:
        rows.append(["data", *(run.data_group or "unknown" for run in comparison.runs)])
    for figure in comparison.figures:
        rows.append([figure.title, *(format_figure(figure, index) for index in range(len(comparison.runs)))])
    return _Grid(head=_name_columns(comparison, "result"), rows=rows)


def _name_columns(comparison: Comparison, first: str) -> list[str]:
    return [first, *(run.name for run in comparison.runs)]


def _make_curves(comparison: Comparison) -> Iterator[_Grid]:
    for chart in comparison.charts:
        if chart.metric in _OMITTED:
            continue
        curves = [(run.name, series) for run in comparison.runs for series in run.series]
        rows = [[name, *_pick_points(series, chart.unit)] for name, series in curves if series.metric == chart.metric]
        width = max(map(len, rows))
        head = ["run", *(str(number) for number in range(1, width))]
        title = chart.title[0].upper() + chart.title[1:]
        yield _Grid(title=title, head=head, rows=[row + [""] * (width - len(row)) for row in rows])


def _pick_points(series: Series, unit: str) -> list[str]:
    last = len(series.step) - 1
    indices = sorted({round(number * last / (_POINTS - 1)) for number in range(_POINTS)})
    values = ((series.step[index], series.mean[index]) for index in indices)
    return [f"{step:,}: {_MISSING if value is None else format_value(value, unit)}" for step, value in values]


def _list_breakdowns(comparison: Comparison) -> Iterator[_Item]:
    for run in comparison.runs:
        if run.shares:
            total = sum(share.seconds for share in run.shares)
            parts = ", ".join(f"{share.part} {format_percent(share.seconds / total)}" for share in run.shares)
            basis = "" if run.shares_are_recorded else " (sum of steps and evaluations)"
            yield run.name, f": {parts}; total {format_seconds(total)}{basis}"


def _make_settings(comparison: Comparison) -> Iterator[_Grid]:
    rows = [[item.key, *(_MISSING if v is None else v for v in item.values)] for item in comparison.settings]
    if rows:
        yield _Grid(head=_name_columns(comparison, "setting"), rows=rows)


def format_figure(figure: Figure, index: int) -> str:
    """Format a result of one run, with a star if it is the best."""
    value = figure.values[index]
    if value is None:
        return _MISSING
    text = format_value(value, figure.unit)
    if figure.key == "cost":
        text = format_cost(value, figure.unit)
    elif "loss" in figure.key:
        text = f"{value:#.4g}"  # the same number of digits in every row
    if figure.key == "prediction_error" and value > 0:
        text = f"+{text}"
    if figure.intervals and (interval := figure.intervals[index]) is not None:
        sign = "+" if figure.unit == "points" else ""
        text += f" ({100 * interval.low:{sign}.1f} to {100 * interval.high:{sign}.1f})"
    return f"{text} {_BEST}" if index in figure.best else f"{text} tie" if index in figure.ties else text


def render_markdown(comparison: Comparison) -> str:
    """Render a comparison of runs as Markdown."""
    parts = ["<!-- made by launcher compare -->", f"# {inline(comparison.title)}", f"As of {comparison.made_at}."]
    for title, blocks in _list_sections(comparison):
        parts.append(f"## {title}")
        for block in blocks:
            if isinstance(block, _Grid):
                parts += [f"### {inline(block.title)}"] if block.title else []
                lines = [[*map(inline, line)] for line in (block.head, *block.rows)]
                lines.insert(1, ["---", *["---:"] * (len(block.head) - 1)])
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
            elif isinstance(block, str):
                parts.append(inline(block))
            else:
                parts.append("\n".join(f"- **{inline(words)}**{inline(text)}" for words, text in block))
    return "\n\n".join(part for part in parts if part) + "\n"


def print_comparison(comparison: Comparison, console: Console, *, is_unicode: bool = True) -> None:
    """Print all sections, with tables split into blocks of columns that fit the console."""

    def clean(text: str) -> str:
        return escape(text) if is_unicode else escape(text).replace(_BEST, "*")

    console.print(Text(clean(comparison.title), style="bold"))
    console.print(Text(f"made by launcher compare, as of {comparison.made_at}", style="dim"))
    for title, blocks in _list_sections(comparison):
        console.print(Text(f"\n{title}", style="bold underline"))
        for block in blocks:
            if isinstance(block, _Grid):
                _print_grid(block, console, clean)
            elif isinstance(block, list):
                for words, text in block:
                    console.print(Text.assemble("- ", (clean(words), "bold"), clean(text)))
            elif block:
                console.print(Text(clean(block)))


def _print_grid(grid: _Grid, console: Console, clean: Callable[[str], str]) -> None:
    if grid.title:
        console.print(Text(f"\n{clean(grid.title)}", style="bold"))
    lines = [[*map(clean, line)] for line in (grid.head, *grid.rows)]
    widths = [min(_MAX_WIDTH, max(map(cell_len, column))) for column in zip(*lines, strict=True)]
    for number, block in enumerate(_fill_blocks(widths, console.width)):
        if number:
            console.print()
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for at in (0, *block):
            justify: Literal["right", "left"] = "right" if at else "left"
            table.add_column(Text(lines[0][at]), justify=justify, overflow="fold", max_width=_MAX_WIDTH)
        for line in lines[1:]:
            cells = [Text(line[at], style="bold green" if line[at].endswith((_BEST, " *")) else "") for at in block]
            table.add_row(Text(line[0]), *cells)
        console.print(table)


def _fill_blocks(widths: Sequence[int], width: int) -> list[list[int]]:
    """Group the columns of a table into blocks that fit `width`; the first column is repeated in each block."""
    blocks: list[list[int]] = [[]]
    used = widths[0]
    for at in range(1, len(widths)):
        if blocks[-1] and used + _GAP + widths[at] > width:
            blocks.append([])
            used = widths[0]
        blocks[-1].append(at)
        used += _GAP + widths[at]
    return blocks
