"""Tables and bars on a terminal: plain where there is none, without colour where NO_COLOR says so."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.errors import escape

_WIDTH_WITHOUT_TERMINAL = 120
_LEAST_WIDTH = 60
_FULL_BLOCK = "█"


def make_console() -> Console:
    """Writes to stdout. Wide enough to read when the output is a file."""
    # Both sizes are given: rich would read COLUMNS and LINES itself, and stumbles over digits such as "²".
    return Console(highlight=False, width=max(_LEAST_WIDTH, _find_width()), height=25)


def _find_width() -> int:
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if re.fullmatch("[0-9]{1,4}", columns) else _WIDTH_WITHOUT_TERMINAL


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    table = Table(box=None, show_edge=False, pad_edge=False, header_style="bold")
    for position, title in enumerate(head):
        table.add_column(title, style=styles[position] if position < len(styles) else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape(cell)) for cell in row))  # foreign text is never markup
    make_console().print(table)


def format_bar(fraction: float, width: int = 30) -> str:
    """Filled from the left; anything above nothing is visible."""
    filled = round(max(0.0, min(1.0, fraction)) * width)
    return _bar_sign() * max(filled, 1 if fraction > 0 else 0)


def _bar_sign() -> str:
    try:
        _FULL_BLOCK.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return _FULL_BLOCK
