"""Escaping of foreign text in our Markdown: no markup, secrets or escape sequences."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.core.errors import escape

_MARKUP = re.compile(r"([\\`*_\[\]>|#~])")


def one_line(text: str) -> str:
    """Return text as one line without escape sequences."""
    return escape(" ".join(text.split()))


def prose(text: str) -> str:
    """Escape text for use as a paragraph."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", inline(text))


def inline(text: str) -> str:
    """Escape text for use within a line or cell; what is markup only at the start of a paragraph is kept."""
    return _MARKUP.sub(r"\\\1", one_line(text)).replace("<", "&lt;")


def code(text: str) -> str:
    """Escape text for use in a code span."""
    return one_line(text).replace("`", "'")


def fenced(text: str, language: str) -> str:
    """Return a fenced code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip(chr(10))}\n{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; cells are Markdown, with pipes escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_fill_cell(cell) for cell in line)} |" for line in lines)


def _fill_cell(cell: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", cell)
