"""Quality gate: fails if an expert got worse by more than allowed, and the drop is statistically significant."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.core.units import format_percent
from launcher.judges.statistics import PairedChange

SIGNIFICANCE_LEVEL = 0.05  # without a real change, the gate fails at most once in 20 times


@dataclass(frozen=True, kw_only=True, slots=True)
class GateVerdict:
    """Result of the quality gate."""

    is_open: bool
    message: str


def check_change(change: PairedChange, max_regression: float) -> GateVerdict:
    """Apply the quality gate; `max_regression` is the allowed drop of the pass rate (0.05: five percentage points)."""
    if change.num_rows == 0:
        return GateVerdict(is_open=False, message="no row was judged in both evaluations: nothing to compare")
    summary = (
        f"{change.num_lost} of {change.num_rows} rows newly wrong, {change.num_won} newly right: "
        f"{change.difference * 100:+.1f} points ({change.low * 100:+.1f} to {change.high * 100:+.1f}, 95 % confidence)"
    )
    allowed = format_percent(max_regression)
    if -change.difference > max_regression and change.p_worse < SIGNIFICANCE_LEVEL:
        accident = f"chance alone would cause this in 1 of {1 / max(change.p_worse, 1e-12):,.0f} cases"
        return GateVerdict(is_open=False, message=f"worse by more than {allowed}: {summary}; {accident}")
    if -change.low > max_regression:
        return GateVerdict(
            is_open=True,
            message=f"inconclusive: too few rows to rule out a drop of more than {allowed}: {summary}",
        )
    return GateVerdict(is_open=True, message=f"not worse by more than {allowed}: {summary}")
