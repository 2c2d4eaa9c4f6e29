"""A drawing as values: rectangles, lines and words, which become SVG on a page and pixels in a file."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Literal

Colour = tuple[int, int, int]
Anchor = Literal["start", "end"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    x: int
    y: int
    width: int
    height: int
    colour: Colour


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """`y` is the middle of the line."""

    x: int
    y: int
    text: str
    colour: Colour
    size: int = 2  # of a dot of its letters, in pixels
    anchor: Anchor = "start"


@dataclass(kw_only=True, slots=True)
class Drawing:
    width: int
    height: int
    ground: Colour
    boxes: list[Box] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)


_EM = 8


def render_svg(drawing: Drawing) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width} {drawing.height}" role="img" '
        'font-family="system-ui, sans-serif">',
        f'<rect width="{drawing.width}" height="{drawing.height}" fill="{_hex(drawing.ground)}"/>',
    ]
    parts += [
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" fill="{_hex(box.colour)}"/>'
        for box in drawing.boxes
    ]
    parts += [
        f'<text x="{word.x}" y="{word.y}" dy="0.35em" font-size="{_EM * word.size:g}" fill="{_hex(word.colour)}" '
        f'text-anchor="{word.anchor}">{html.escape(word.text)}</text>'
        for word in drawing.words
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
