"""The ladder as a table, as Markdown, as a page and as a picture: the same figures in all of them."""

from __future__ import annotations

import struct
import zlib

import pytest

from launcher.bench.drawing import Box, Drawing, Words, render_svg
from launcher.bench.ladder_page import render_page
from launcher.bench.ladder_plot import draw_ladder
from launcher.bench.ladder_report import list_missing, make_rows, render_markdown
from launcher.bench.png import render_png
from tests.unit.bench.made_ladder import make_made_ladder

WHITE, RED = (255, 255, 255), (200, 10, 20)


def test_rows_compare_with_the_loop_before() -> None:
    rows = {row[0]: row[1:] for row in make_rows(make_made_ladder())}
    assert rows["the rung before"][:4] == ("100", "1.00", "", "")
    assert rows["the rung packing"] == ("250", "2.50", "80.0", "0.80", "25.0 %", "3.21 GiB", "90 %")
    assert rows["the rung loss"] == ("out of memory", "-", "130", "1.30", "-", "-", "-")
    assert rows["the rung launcher"][:2] == ("400", "4.00")
    assert "FP32 -> TF32" not in rows


def test_the_median_step_counts() -> None:
    """One step of three took twice as long."""
    rows = {row[0]: row for row in make_rows(make_made_ladder())}
    assert rows["the rung before"][1] == "100"


def test_what_was_not_measured_is_listed_with_its_reason() -> None:
    assert list_missing(make_made_ladder()) == [
        "not here: FP32 -> TF32: no <GPU> & more",
        "the rung loss (cumulative): out of memory: 3 GiB more",
    ]


def test_a_machine_that_drifts_is_told() -> None:
    assert make_made_ladder(again=98).notes == ("the rung packing (alone): micro-batch 4: 8 did not fit",)
    assert "the machine drifted" in make_made_ladder(again=90).notes[0]


def test_markdown_holds_all_of_it() -> None:
    text = render_markdown(make_made_ladder("busy"))
    assert "| the rung packing | 250 | 2.50 | 80.0 | 0.80 | 25.0 % | 3.21 GiB | 90 % |" in text
    assert "- not here: FP32 -\\> TF32: no &lt;GPU\\> & more" in text
    assert "- note: busy" in text


def test_the_page_escapes_what_is_foreign_and_has_no_script() -> None:
    page = render_page(make_made_ladder())
    assert "no &lt;GPU&gt; &amp; more" in page
    assert "<GPU>" not in page
    assert "<script" not in page
    assert "default-src 'none'" in page


def test_the_longest_bar_is_the_fastest_rung() -> None:
    drawing = draw_ladder(make_made_ladder())
    bars = sorted((box for box in drawing.boxes if box.height > 10 and box.width > 1), key=lambda box: box.y)
    left = [box for box in bars if box.x == min(box.x for box in bars)]
    assert [box.width / left[-1].width for box in left] == pytest.approx([0.25, 0.625, 1.0], abs=0.01)
    assert all(box.x >= 0 and box.x + box.width <= drawing.width for box in drawing.boxes)
    assert all(box.y >= 0 and box.y + box.height <= drawing.height for box in drawing.boxes)


def read_png(data: bytes) -> list[list[tuple[int, ...]]]:
    """Lines of pixels, by the format's own rules: every chunk has the checksum that it says."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + length
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    raw, line = zlib.decompress(chunks[b"IDAT"]), 1 + 3 * width
    assert len(raw) == height * line
    lines = [raw[y * line + 1 : (y + 1) * line] for y in range(height)]
    return [[tuple(one[3 * x : 3 * x + 3]) for x in range(width)] for one in lines]


def test_pixels_are_where_the_drawing_has_them() -> None:
    drawing = Drawing(width=20, height=12, ground=WHITE, boxes=[Box(x=18, y=2, width=9, height=3, colour=RED)])
    pixels = read_png(render_png(drawing))
    assert {(x, y) for y, row in enumerate(pixels) for x, pixel in enumerate(row) if pixel == RED} == {
        (x, y) for x in (18, 19) for y in (2, 3, 4)
    }


def test_letters_are_drawn_dot_by_dot() -> None:
    drawing = Drawing(width=8, height=9, ground=WHITE, words=[Words(x=1, y=4, text="T", colour=RED, size=1)])
    shown = ["".join("#" if pixel == RED else "." for pixel in row) for row in read_png(render_png(drawing))]
    assert shown[1:8] == [".#####..", *["...#...."] * 6]


def test_words_of_the_picture_stand_on_the_page_too() -> None:
    drawing = draw_ladder(make_made_ladder())
    svg = render_svg(drawing)
    assert "x2.50" in svg
    assert svg.count("<text") == len(drawing.words)
