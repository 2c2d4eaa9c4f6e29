"""A figure: how it is computed, which runs it compares, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.compare.facts import RunFacts
from launcher.compare.model import Figure, Interval

ALIKE, ALIKE_LOSS, _ALIKE_SHARE = 0.005, 0.001, 0.005  # the last is absolute: half a point of a percentage

Compute = Callable[[RunFacts], float | None]
Peers = Callable[[RunFacts], Hashable]  # runs of the same value compare; None compares with nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    key: str
    title: str
    compute: Compute
    peers: Peers
    unit: str = ""
    better: Literal["lower", "higher"] | None = None
    note: str = ""
    alike: float = ALIKE  # what differs by less is chance, and looks the same in a table
    reach: Callable[[RunFacts], Interval | None] | None = None  # where the figure lies with 95 %
    is_told_apart: Callable[[RunFacts, RunFacts], bool] | None = None  # the second from the best, by more than chance


def make_figure(kind: Kind, runs: Sequence[RunFacts]) -> Figure | None:
    """None where no run has it."""
    values = tuple(_tame(kind.compute(run)) for run in runs)
    if all(value is None for value in values):
        return None
    return Figure(
        key=kind.key,
        title=kind.title,
        unit=kind.unit,
        better=kind.better,
        values=values,
        intervals=() if kind.reach is None else tuple(map(kind.reach, runs)),
        best=_find_best(kind, runs, values),
        note=kind.note,
    )


def _find_best(kind: Kind, runs: Sequence[RunFacts], values: Sequence[float | None]) -> dict[int, int]:
    if kind.better is None:
        return {}
    groups: dict[Hashable, list[int]] = {}
    for index, (run, value) in enumerate(zip(runs, values, strict=True)):
        peers = kind.peers(run)
        if value is not None and peers is not None:
            groups.setdefault(peers, []).append(index)
    best: dict[int, int] = {}
    for group in groups.values():
        told = {index: value for index in group if (value := values[index]) is not None}
        wanted = (min if kind.better == "lower" else max)(told, key=lambda index: told[index])
        first = {index: len(group) for index in told if _is_alike(kind, runs, told, index, wanted)}
        if len(first) < len(group):  # equal runs have no best one
            best.update(first)
    return dict(sorted(best.items()))


def _is_alike(kind: Kind, runs: Sequence[RunFacts], told: dict[int, float], index: int, best: int) -> bool:
    if kind.is_told_apart is not None:
        return not kind.is_told_apart(runs[best], runs[index])
    if kind.unit == "share":
        return abs(told[index] - told[best]) <= _ALIKE_SHARE
    return math.isclose(told[index], told[best], rel_tol=kind.alike)


def _tame(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
