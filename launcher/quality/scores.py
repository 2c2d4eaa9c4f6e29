"""Rates with their uncertainty, and whether one set of answers is worse than another on the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, erf, sqrt

_Z = 1.959963984540054  # 95 % of a normal distribution lie within so many deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Of those that could be judged."""

    num_passed: int
    num_judged: int
    low: float  # Wilson's interval of 95 %: holds near 0 and 1, and for few rows
    high: float

    @property
    def value(self) -> float:
        return self.num_passed / self.num_judged if self.num_judged else 0.0


def make_rate(passed: Sequence[bool | None]) -> Rate:
    judged = [one for one in passed if one is not None]
    low, high = _wilson(sum(judged), len(judged))
    return Rate(num_passed=sum(judged), num_judged=len(judged), low=low, high=high)


def _wilson(passed: int, total: int) -> tuple[float, float]:
    if total == 0:
        return 0.0, 1.0
    share, square = passed / total, _Z * _Z
    middle = (share + square / (2 * total)) / (1 + square / total)
    reach = _Z * sqrt(share * (1 - share) / total + square / (4 * total * total)) / (1 + square / total)
    return max(0.0, middle - reach), min(1.0, middle + reach)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """From earlier answers to later ones, row by row."""

    num_rows: int  # judged both times
    num_lost: int  # right before, wrong now
    num_won: int
    p_worse: float  # how likely so many more are lost than won where nothing has changed (exact, one-sided)
    low: float  # of the difference in the rate, 95 %
    high: float

    @property
    def difference(self) -> float:
        """Of the rate: negative is worse."""
        return (self.num_won - self.num_lost) / self.num_rows if self.num_rows else 0.0


def make_change(before: Sequence[bool | None], now: Sequence[bool | None]) -> Change:
    """McNemar's test, exact: rows that are right both times, or wrong both times, tell nothing about a change."""
    pairs = [(old, new) for old, new in zip(before, now, strict=True) if old is not None and new is not None]
    lost = sum(old and not new for old, new in pairs)
    won = sum(new and not old for old, new in pairs)
    low, high = _difference(lost, won, len(pairs))
    return Change(
        num_rows=len(pairs), num_lost=lost, num_won=won, p_worse=_p_at_least(lost, lost + won), low=low, high=high
    )


def _p_at_least(count: int, total: int) -> float:
    """Of so many heads or more in so many tosses. Beyond a few thousand the normal curve is as good."""
    if total > 2000:
        return 0.5 * (1 - erf((count - 0.5 - total / 2) / sqrt(total / 2)))
    return float(sum(comb(total, heads) for heads in range(count, total + 1)) / 2**total)


def _difference(lost: int, won: int, total: int) -> tuple[float, float]:
    """Of paired rates, by Agresti and Min: half a row is added to each cell, which keeps it honest for few rows."""
    if total == 0:
        return -1.0, 1.0
    total, more, fewer = total + 2, won + 0.5, lost + 0.5
    middle = (more - fewer) / total
    reach = _Z * sqrt(max(0.0, more + fewer - (more - fewer) ** 2 / total)) / total
    return max(-1.0, middle - reach), min(1.0, middle + reach)
