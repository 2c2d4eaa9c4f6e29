"""Plots of text characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-:=+*#"
_BRAILLE = 0x2800
# Bits of a braille character, by column and row of its dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_DOTS_WIDE, _DOTS_HIGH = 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points of a curve."""

    xs: Sequence[float]
    ys: Sequence[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One character of a plot and the curve it belongs to."""

    sign: str
    curve: int | None


def render_sparkline(
    curve: Curve, width: int, x_range: tuple[float, float], y_range: tuple[float, float], *, is_unicode: bool
) -> str:
    """Draw a curve as one line of blocks; a shorter run gives a shorter line."""
    signs = _BLOCKS if is_unicode else _ASCII_BLOCKS
    low, high = y_range
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if y is not None:
            columns[_scale(x, x_range, width)].append(y)
    means = _fill([math.fsum(column) / len(column) if column else None for column in columns])
    return "".join(" " if mean is None else signs[_scale(mean, (low, high), len(signs))] for mean in means)


def _fill(means: list[float | None]) -> list[float | None]:
    """Repeat the previous value in gaps."""
    known = [index for index, mean in enumerate(means) if mean is not None]
    if not known:
        return means
    filled = list(means)
    for index in range(known[0], known[-1] + 1):
        filled[index] = means[index] if means[index] is not None else filled[index - 1]
    return filled


def render_plot(
    curves: Sequence[Curve], width: int, height: int, x_range: tuple[float, float], y_range: tuple[float, float]
) -> list[list[Cell]]:
    """Draw all curves with braille dots, top row first; later curves win shared characters."""
    masks = [[0] * width for _ in range(height)]
    owners: list[list[int | None]] = [[None] * width for _ in range(height)]
    for index, curve in enumerate(curves):
        for column, row in _trace_dots(curve, width * _DOTS_WIDE, height * _DOTS_HIGH, x_range, y_range):
            cell_row, cell_column = row // _DOTS_HIGH, column // _DOTS_WIDE
            masks[cell_row][cell_column] |= _DOTS[column % _DOTS_WIDE][row % _DOTS_HIGH]
            owners[cell_row][cell_column] = index
    return [
        [Cell(sign=chr(_BRAILLE + mask) if mask else " ", curve=owner) for mask, owner in zip(*line, strict=True)]
        for line in zip(masks, owners, strict=True)
    ]


def _trace_dots(
    curve: Curve, wide: int, high: int, x_range: tuple[float, float], y_range: tuple[float, float]
) -> set[tuple[int, int]]:
    """Return the dots of the mean per column, connected by lines."""
    columns: dict[int, list[float]] = {}
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if y is not None:
            columns.setdefault(_scale(x, x_range, wide), []).append(y)
    path = [(at, high - 1 - _scale(math.fsum(ys) / len(ys), y_range, high)) for at, ys in sorted(columns.items())]
    dots = set(path)
    for (column, row), (next_column, next_row) in pairwise(path):
        length = max(next_column - column, abs(next_row - row))
        for part in range(1, length):
            dots.add(
                (column + round(part * (next_column - column) / length), row + round(part * (next_row - row) / length))
            )
    return dots


def _scale(value: float, bounds: tuple[float, float], size: int) -> int:
    low, high = bounds
    share = (value - low) / (high - low) if high > low else 0.5
    return max(0, min(size - 1, math.floor(share * size)))
