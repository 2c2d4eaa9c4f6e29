"""Pass rates with confidence intervals, and a paired comparison of two evaluations on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, erf, sqrt

_Z = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Pass rate among the judged answers."""

    num_passed: int
    num_judged: int
    low: float  # Wilson's 95 % interval, valid near 0 and 1 and for few rows
    high: float

    @property
    def value(self) -> float:
        """Share of the judged answers that passed."""
        return self.num_passed / self.num_judged if self.num_judged else 0.0


def compute_rate(passed: Sequence[bool | None]) -> Rate:
    """Return the pass rate of a check's results; None, which means not judged, does not count."""
    judged = [result for result in passed if result is not None]
    low, high = _wilson(sum(judged), len(judged))
    return Rate(num_passed=sum(judged), num_judged=len(judged), low=low, high=high)


def _wilson(passed: int, total: int) -> tuple[float, float]:
    if total == 0:
        return 0.0, 1.0
    share, square = passed / total, _Z * _Z
    center = (share + square / (2 * total)) / (1 + square / total)
    margin = _Z * sqrt(share * (1 - share) / total + square / (4 * total * total)) / (1 + square / total)
    return max(0.0, center - margin), min(1.0, center + margin)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedChange:
    """Change between two evaluations of the same rows."""

    num_rows: int  # judged in both
    num_lost: int  # correct before, wrong now
    num_won: int
    p_worse: float  # one-sided p-value of McNemar's exact test
    low: float  # 95 % interval of the difference in rates
    high: float

    @property
    def difference(self) -> float:
        """Difference in rates; negative is worse."""
        return (self.num_won - self.num_lost) / self.num_rows if self.num_rows else 0.0


def compare_paired(before: Sequence[bool | None], now: Sequence[bool | None]) -> PairedChange:
    """Compare two evaluations by McNemar's exact test, in which only rows with different results count."""
    pairs = [(old, new) for old, new in zip(before, now, strict=True) if old is not None and new is not None]
    lost = sum(old and not new for old, new in pairs)
    won = sum(new and not old for old, new in pairs)
    low, high = _difference(lost, won, len(pairs))
    return PairedChange(
        num_rows=len(pairs), num_lost=lost, num_won=won, p_worse=_p_at_least(lost, lost + won), low=low, high=high
    )


def _p_at_least(count: int, total: int) -> float:
    """Return P(X >= count) for X ~ Binomial(total, 1/2); normal approximation for a large total."""
    if total > 2000:
        return 0.5 * (1 - erf((count - 0.5 - total / 2) / sqrt(total / 2)))
    return float(sum(comb(total, heads) for heads in range(count, total + 1)) / 2**total)


def _difference(lost: int, won: int, total: int) -> tuple[float, float]:
    """Return the 95 % Agresti-Min confidence interval of a difference of paired rates (adds 0.5 to each cell)."""
    if total == 0:
        return -1.0, 1.0
    total, more, fewer = total + 2, won + 0.5, lost + 0.5
    center = (more - fewer) / total
    margin = _Z * sqrt(max(0.0, more + fewer - (more - fewer) ** 2 / total)) / total
    return max(-1.0, center - margin), min(1.0, center + margin)
