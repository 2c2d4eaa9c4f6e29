"""Tables and bars on a terminal: plain where there is none, without colour where NO_COLOR says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_WIDTH_WITHOUT_TERMINAL = 120


def make_console() -> Console:
    """Writes to stdout. Wide enough to read when the output is a file."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        width = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else _WIDTH_WITHOUT_TERMINAL
        console = Console(highlight=False, width=max(60, width))
    elif shutil.get_terminal_size().columns < 60:
        console = Console(highlight=False, width=60)
    return console


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    table = Table(box=None, show_edge=False, pad_edge=False, header_style="bold")
    for position, title in enumerate(head):
        table.add_column(title, style=styles[position] if position < len(styles) else "", overflow="fold")
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    make_console().print(table)


def _plain(text: str) -> str:
    """Foreign text is never markup."""
    return text.replace("[", "\\[")


def format_bar(fraction: float, width: int = 30) -> str:
    """Filled from the left; anything above nothing is visible."""
    filled = round(max(0.0, min(1.0, fraction)) * width)
    return "█" * max(filled, 1 if fraction > 0 else 0)
