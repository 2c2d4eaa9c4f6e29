"""JSON, tables and bars on stdout, without color if stdout is not a terminal or NO_COLOR is set."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.core.errors import InputError, escape
from launcher.core.redaction import redact_file

_WIDTH_WITHOUT_TERMINAL = 120
_MIN_WIDTH = 60
_FULL_BLOCK = "█"


def make_console() -> Console:
    """Return a rich console on stdout, as wide as the terminal; without one, COLUMNS or 120 columns wide."""
    # Both sizes are set: rich would read COLUMNS and LINES itself, and fails on digits such as "²".
    return Console(highlight=False, width=max(_MIN_WIDTH, _get_width()), height=25)


def _get_width() -> int:
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if re.fullmatch("[0-9]{1,4}", columns) else _WIDTH_WITHOUT_TERMINAL


def print_json(content: object) -> None:
    """Print a value as JSON, with secrets redacted."""
    tree = content.model_dump(mode="json") if isinstance(content, BaseModel) else content
    print(redact_file(Path("stdout.json"), json.dumps(tree, indent=2, ensure_ascii=False)))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print rows as a table."""
    table = Table(box=None, show_edge=False, pad_edge=False, header_style="bold")
    for position, title in enumerate(head):
        table.add_column(title, style=styles[position] if position < len(styles) else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape(cell)) for cell in row))  # never markup
    make_console().print(table)


def confirm(question: str, ask: bool) -> bool:
    """Ask a yes-or-no question on the terminal and return the answer; if `ask` is False, return True without asking."""
    if not ask:
        return True
    if not sys.stdin.isatty():
        raise InputError("no terminal to prompt on", hint="pass --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def format_bar(fraction: float, width: int = 30) -> str:
    """Return a bar of characters whose length shows a fraction: at least one character for any fraction above 0."""
    filled = round(max(0.0, min(1.0, fraction)) * width)
    return _get_bar_char() * max(filled, 1 if fraction > 0 else 0)


def _get_bar_char() -> str:
    try:
        _FULL_BLOCK.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return _FULL_BLOCK
