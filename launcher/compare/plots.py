"""Small plots made of characters: they cross an SSH connection, a pipe and a log."""

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
    xs: Sequence[float]
    ys: Sequence[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One character of a plot, and whose it is: None where no curve runs."""

    sign: str
    curve: int | None


def render_sparkline(
    curve: Curve, width: int, x_range: tuple[float, float], y_range: tuple[float, float], *, is_unicode: bool
) -> str:
    """One line of blocks. Places that the curve does not reach stay empty: a shorter run is a shorter line."""
    signs = _BLOCKS if is_unicode else _ASCII_BLOCKS
    low, high = y_range
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if y is not None:
            columns[_scale(x, x_range, width)].append(y)
    means = _fill([math.fsum(column) / len(column) if column else None for column in columns])
    return "".join(" " if mean is None else signs[_scale(mean, (low, high), len(signs))] for mean in means)


def _fill(means: list[float | None]) -> list[float | None]:
    """Between two places that are known, the value stays what it was."""
    known = [place for place, mean in enumerate(means) if mean is not None]
    if not known:
        return means
    filled = list(means)
    for place in range(known[0], known[-1] + 1):
        filled[place] = means[place] if means[place] is not None else filled[place - 1]
    return filled


def render_plot(
    curves: Sequence[Curve], width: int, height: int, x_range: tuple[float, float], y_range: tuple[float, float]
) -> list[list[Cell]]:
    """All curves in one field of braille dots, from the top. A character that two share belongs to the later."""
    masks = [[0] * width for _ in range(height)]
    owners: list[list[int | None]] = [[None] * width for _ in range(height)]
    for index, curve in enumerate(curves):
        for column, row in _find_dots(curve, width * _DOTS_WIDE, height * _DOTS_HIGH, x_range, y_range):
            cell_row, cell_column = row // _DOTS_HIGH, column // _DOTS_WIDE
            masks[cell_row][cell_column] |= _DOTS[column % _DOTS_WIDE][row % _DOTS_HIGH]
            owners[cell_row][cell_column] = index
    return [
        [Cell(sign=chr(_BRAILLE + mask) if mask else " ", curve=owner) for mask, owner in zip(*line, strict=True)]
        for line in zip(masks, owners, strict=True)
    ]


def _find_dots(
    curve: Curve, wide: int, high: int, x_range: tuple[float, float], y_range: tuple[float, float]
) -> set[tuple[int, int]]:
    """Dots of the mean in every column, joined: from each to the next."""
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
