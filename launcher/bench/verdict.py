"""What an interval says, in words."""

from __future__ import annotations

from launcher.bench.interval import Interval

_SAME_WITHIN = 0.01  # nobody would change a setting for less


def format_verdict(label: str, other: str, interval: Interval) -> str:
    """`interval` is of the label's speed to the other's. The faster one is named first."""
    pair = f"{label} and {other}"
    if interval.low >= 1 - _SAME_WITHIN and interval.high <= 1 + _SAME_WITHIN:
        return f"{pair}: no difference, to within 1 % {_format_reach(interval)}"
    if interval.low > 1:
        return f"{label} is {interval.ratio:.2f} times as fast as {other} {_format_reach(interval)}"
    if interval.high < 1:
        return format_verdict(other, label, interval.inverse)
    reach = f"{_format_bound(interval.low)} to {_format_bound(interval.high)}"
    return f"{pair}: no difference seen: {reach}; more repeats could tell"


def _format_reach(interval: Interval) -> str:
    return f"({_format_bound(interval.low)} to {_format_bound(interval.high)})"


def _format_bound(bound: float) -> str:
    """Three digits behind the point next to 1, where two would say 1.00."""
    return f"{bound:.3f}" if 0.99 <= bound <= 1.01 else f"{bound:.2f}"
