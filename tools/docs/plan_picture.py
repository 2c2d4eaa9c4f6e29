"""docs/images/plan.svg: the terminal output of one plan, as text in an image."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from collections.abc import Iterator
from xml.sax.saxutils import escape

from launcher.cli.main import main
from tools.docs.environment import plain_environment

COMMAND = "launcher plan neo4j --gpu rtx4090 --price 0.40/h"
_COLUMNS = 132
_WIDTH, _HEIGHT, _MARGIN = 7.3, 17, 16  # of a character, of a line, around the text
_HEADERS = re.compile(r"^(decision|part) ")
_NAME = re.compile(r"^(\S+(?: \S+)*(?<!:))(  .*)$")
_STYLE = (
    "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d7dde8;white-space:pre}"
    ".name{fill:#7fc8d8}.bar{fill:#7cc47f}.head{font-weight:bold;fill:#fff}"
)


def render_plan_picture() -> str:
    lines = [f"$ {COMMAND}", *_wrap(_print_plan().rstrip().split("\n"))]
    width, height = round(_COLUMNS * _WIDTH + 2 * _MARGIN), len(lines) * _HEIGHT + 2 * _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" rx="8" fill="#1b2130"/>'
    )
    return "\n".join([head, *_render_lines(lines), "</svg>", ""])


def _print_plan() -> str:
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with plain_environment(COLUMNS=str(_COLUMNS), NO_COLOR="1"), contextlib.redirect_stdout(output):
        assert main(COMMAND.split()[1:]) == 0
    output.seek(0)
    return output.read()


def _wrap(lines: list[str]) -> Iterator[str]:
    """Wrap sentences; tables already fit the width."""
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        yield from textwrap.wrap(line, _COLUMNS, subsequent_indent=indent) if len(line) > _COLUMNS else [line]


def _render_lines(lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        y = _MARGIN + (number + 1) * _HEIGHT - 5
        if line.strip():
            yield f'<text x="{_MARGIN}" y="{y}">{_render_line(line.rstrip())}</text>'


def _render_line(line: str) -> str:
    if line.startswith("$ ") or _HEADERS.match(line):
        return f'<tspan class="head">{escape(line)}</tspan>'
    named = _NAME.match(line)
    text = escape(line)
    if named:
        text = f'<tspan class="name">{escape(named[1])}</tspan>{escape(named[2])}'
    return re.sub("(█+)", r'<tspan class="bar">\1</tspan>', text)
