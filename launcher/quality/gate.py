"""Is an expert still as good as before? A drop counts where it is larger than allowed and no accident."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.quality.scores import Change
from launcher.units import format_percent

P_LIMIT = 0.05  # of an accident; where nothing has changed, the gate closes at most once in twenty times


@dataclass(frozen=True, kw_only=True, slots=True)
class GateVerdict:
    is_open: bool
    words: str


def judge_change(change: Change, max_drop: float) -> GateVerdict:
    """`max_drop` is a difference of rates: 0.05 is five rows of a hundred."""
    if change.num_rows == 0:
        return GateVerdict(is_open=False, words="no row was judged both times: there is nothing to compare")
    told = (
        f"{change.num_lost} of {change.num_rows} rows lost, {change.num_won} won: "
        f"{change.difference * 100:+.1f} points ({change.low * 100:+.1f} to {change.high * 100:+.1f} with 95 %)"
    )
    allowed = format_percent(max_drop)
    if -change.difference > max_drop and change.p_worse < P_LIMIT:
        accident = f"by accident once in {1 / max(change.p_worse, 1e-12):,.0f} times"
        return GateVerdict(is_open=False, words=f"worse by more than {allowed}: {told}; {accident}")
    if -change.low > max_drop:
        return GateVerdict(
            is_open=True,
            words=f"no drop of more than {allowed} is shown, and none is excluded: {told}; more rows would tell",
        )
    return GateVerdict(is_open=True, words=f"not worse by more than {allowed}: {told}")
