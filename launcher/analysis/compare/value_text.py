"""Format results and time shares for terminal and Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.analysis.compare.model import Figure, Share
from launcher.core.units import format_count, format_percent

MISSING = "-"
BEST = "★"


def format_figure(figure: Figure, index: int) -> str:
    """Format a result of one run, with a star if it is the best."""
    value = figure.values[index]
    if value is None:
        return MISSING
    text = format_value(value, figure.unit)
    if figure.key == "cost":
        text = f"{value:.2f}"
    elif "loss" in figure.key:
        text = f"{value:#.4g}"  # the same number of digits in every row
    if figure.key == "prediction_error" and value > 0:
        text = f"+{text}"
    if figure.intervals and (interval := figure.intervals[index]) is not None:
        sign = "+" if figure.unit == "points" else ""
        text += f" ({100 * interval.low:{sign}.1f} to {100 * interval.high:{sign}.1f})"
    return f"{text} {BEST}" if index in figure.best else text


def format_value(value: float, unit: str) -> str:
    """Format a value in its unit."""
    if unit == "share":
        return format_percent(value)
    if unit == "points":
        return f"{100 * value:+.1f} points"
    if unit == "s":
        return format_seconds(value)
    if unit == "GiB":
        return f"{value:.2f} GiB"
    if unit in ("tokens/s", "tokens", "rows/s"):
        return format_count(value)
    if unit == "J":
        return f"{1000 * value:.3g} mJ" if abs(value) < 0.1 else f"{value:.3g} J"
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1 else f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits."""
    for limit, size, unit in ((1.0, 1e-3, "ms"), (90.0, 1.0, "s"), (5400.0, 60.0, "min")):
        if abs(seconds) < limit and seconds != 0:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h" if seconds else "0 s"


def format_shares(shares: Sequence[Share]) -> str:
    """Format a time breakdown as percentages."""
    total = sum(share.seconds for share in shares)
    return ", ".join(f"{share.part} {format_percent(share.seconds / total)}" for share in shares)
