"""Foreign text inside our Markdown: nothing of it is markup, a secret or an escape sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.errors import escape

_MARKUP = re.compile(r"([\\`*_\[\]>|#~])")


def one_line(text: str) -> str:
    return escape(" ".join(text.split()))


def prose(text: str) -> str:
    """One paragraph in which nothing is markup."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", inline(text))


def inline(text: str) -> str:
    """Within a line or a cell: what only counts at the start of a paragraph is left as it is."""
    return _MARKUP.sub(r"\\\1", one_line(text)).replace("<", "&lt;")


def code(text: str) -> str:
    """For the inside of a code span."""
    return one_line(text).replace("`", "'")


def fenced(text: str, language: str) -> str:
    """The fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip(chr(10))}\n{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are Markdown; what ends a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_fill_cell(cell) for cell in line)} |" for line in lines)


def _fill_cell(cell: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", cell)
