"""A drawing as a PNG file: pixels in memory, and the little that the format asks for. No library is needed."""

from __future__ import annotations

import struct
import zlib

from launcher.bench.drawing import Box, Colour, Drawing, Words
from launcher.bench.glyphs import WIDTH, find_rows

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TRUE_COLOUR, _EIGHT_BITS = 2, 8
_LINE_DOTS = 7  # above the line, which is what a word is centred by


def render_png(drawing: Drawing) -> bytes:
    canvas = _Canvas(drawing.width, drawing.height, drawing.ground)
    for box in drawing.boxes:
        canvas.fill(box)
    for words in drawing.words:
        canvas.write(words)
    return canvas.encode()


class _Canvas:
    def __init__(self, width: int, height: int, ground: Colour) -> None:
        self._width, self._height = width, height
        self._rows = [bytearray(bytes(ground) * width) for _ in range(height)]

    def fill(self, box: Box) -> None:
        """What lies outside is left out."""
        left, right = max(0, box.x), min(self._width, box.x + box.width)
        if right <= left:
            return
        line = bytes(box.colour) * (right - left)
        for y in range(max(0, box.y), min(self._height, box.y + box.height)):
            self._rows[y][3 * left : 3 * right] = line

    def write(self, words: Words) -> None:
        x, y = words.x, words.y - _LINE_DOTS * words.size // 2
        advance = (WIDTH + 1) * words.size
        if words.anchor == "end":
            x -= advance * len(words.text)
        for place, letter in enumerate(words.text):
            self._write_letter(letter, x + place * advance, y, words)

    def _write_letter(self, letter: str, x: int, y: int, words: Words) -> None:
        size = words.size
        for row, dots in enumerate(find_rows(letter)):
            for column in range(WIDTH):
                if dots >> (WIDTH - 1 - column) & 1:
                    self.fill(Box(x=x + column * size, y=y + row * size, width=size, height=size, colour=words.colour))

    def encode(self) -> bytes:
        header = struct.pack(">IIBBBBB", self._width, self._height, _EIGHT_BITS, _TRUE_COLOUR, 0, 0, 0)
        pixels = b"".join(b"\0" + bytes(row) for row in self._rows)  # each line says that it is not filtered
        return (
            _SIGNATURE
            + _make_chunk(b"IHDR", header)
            + _make_chunk(b"IDAT", zlib.compress(pixels, 9))
            + _make_chunk(b"IEND", b"")
        )


def _make_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
