"""Specification of a result: how to compute it, which runs are comparable, and which is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.model import Figure, Interval

ALIKE, ALIKE_LOSS, _ALIKE_SHARE = 0.005, 0.001, 0.005  # the last is absolute: half a percentage point

Compute = Callable[[RunFacts], float | None]
Peers = Callable[[RunFacts], Hashable]  # runs with the same value are comparable; None: with no run


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    """How to compute and compare one result."""

    key: str
    title: str
    compute: Compute
    peers: Peers
    unit: str = ""
    better: Literal["lower", "higher"] | None = None
    note: str = ""
    alike: float = ALIKE  # relative differences below count as equal
    interval: Callable[[RunFacts], Interval | None] | None = None  # 95 % confidence interval
    is_significant: Callable[[RunFacts, RunFacts], bool] | None = None  # whether the best run beats the other


def make_figure(spec: MetricSpec, runs: Sequence[RunFacts]) -> Figure | None:
    """Compute a result for all runs; None if no run has it."""
    values = tuple(_round_finite(spec.compute(run)) for run in runs)
    if all(value is None for value in values):
        return None
    return Figure(
        key=spec.key,
        title=spec.title,
        unit=spec.unit,
        better=spec.better,
        values=values,
        intervals=() if spec.interval is None else tuple(map(spec.interval, runs)),
        best=_find_best(spec, runs, values),
        note=spec.note,
    )


def _find_best(spec: MetricSpec, runs: Sequence[RunFacts], values: Sequence[float | None]) -> dict[int, int]:
    if spec.better is None:
        return {}
    groups: dict[Hashable, list[int]] = {}
    for index, (run, value) in enumerate(zip(runs, values, strict=True)):
        peers = spec.peers(run)
        if value is not None and peers is not None:
            groups.setdefault(peers, []).append(index)
    best: dict[int, int] = {}
    for group in groups.values():
        known = {index: value for index in group if (value := values[index]) is not None}
        leader = (min if spec.better == "lower" else max)(known, key=lambda index: known[index])
        first = {index: len(group) for index in known if _is_alike(spec, runs, known, index, leader)}
        if len(first) < len(group):  # equal runs have no best one
            best.update(first)
    return dict(sorted(best.items()))


def _is_alike(spec: MetricSpec, runs: Sequence[RunFacts], known: dict[int, float], index: int, best: int) -> bool:
    if spec.is_significant is not None:
        return not spec.is_significant(runs[best], runs[index])
    if spec.unit == "share":
        return abs(known[index] - known[best]) <= _ALIKE_SHARE
    return math.isclose(known[index], known[best], rel_tol=spec.alike)


def _round_finite(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
