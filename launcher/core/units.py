"""Units and their formatting; the only module that divides by 1024**3."""

from __future__ import annotations

MIB = 1024**2
GIB = 1024**3
TERA = 1e12


def bytes_to_gib(num_bytes: float) -> float:
    """Convert bytes to GiB."""
    return num_bytes / GIB


def mib_to_bytes(mib: int) -> int:
    """Convert MiB to bytes."""
    return mib * MIB


def format_gib(num_bytes: float) -> str:
    """Format a size as GiB, or as MiB if it is small."""
    gib = bytes_to_gib(num_bytes)
    if abs(gib) >= 0.095:
        return f"{gib:.1f} GiB"
    return f"{num_bytes / MIB:.0f} MiB"


def format_count(number: float) -> str:
    """Abbreviate a number for display: 1234 is 1.2k, 595776512 is 596M."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            value = number / limit
            return f"{value:.0f}{suffix}" if value >= 100 else f"{value:.1f}{suffix}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def format_price(amount: float, currency: str, per: str) -> str:
    """Format a price of one hour of a GPU or a node."""
    return f"{f'{amount:g} {currency}'.strip()} per {per}-hour"


def format_cost(cost: float, currency: str) -> str:
    """Format a cost with two decimals and its currency, if known."""
    return f"{f'{cost:,.2f}' if cost >= 0.01 or cost <= 0 else 'under 0.01'} {currency}".strip()


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * fraction:.1f} %"


def format_value(value: float, unit: str) -> str:
    """Format the value of a metric in its unit; counts and rates are abbreviated, without the unit."""
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
    """Format a duration with three significant digits, in ms, s, min or h."""
    for limit, size, unit in ((1.0, 1e-3, "ms"), (90.0, 1.0, "s"), (5400.0, 60.0, "min")):
        if abs(seconds) < limit and seconds != 0:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h" if seconds else "0 s"
