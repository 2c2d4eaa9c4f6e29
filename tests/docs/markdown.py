"""Commands, inline code, headings and links of the docs, read from Markdown without a library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMAND_BLOCKS = ("", "sh", "bash", "console")
OTHER_BLOCKS = ("text", "json", "python")  # python: run by test_extending.py
_FENCE = re.compile(r"^```(\S*)\s*$")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$")
_COMMENT = re.compile(r"(?:^|\s)#\s.*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A command, a code span or a link, with its location."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    language: str
    line: int  # of the first line inside
    lines: tuple[str, ...]


def list_blocks(page: Path) -> Iterator[Block]:
    language: str | None = None
    held: list[str] = []
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), start=1):
        fence = _FENCE.match(line)
        if fence is None:
            held.append(line)
        elif language is None:
            language, held, start = fence[1], [], number + 1
        else:
            yield Block(language=language, line=start, lines=tuple(held))
            language = None
    assert language is None, f"{page}: a block is not closed"


def list_commands(page: Path) -> Iterator[Piece]:
    """Yield commands without comments; in a block with prompts (`$ `), other lines are output."""
    for block in list_blocks(page):
        if block.language not in COMMAND_BLOCKS:
            continue
        prompted = any(line.startswith("$ ") for line in block.lines)
        for number, line in enumerate(block.lines, start=block.line):
            text = _COMMENT.sub("", line.removeprefix("$ ") if not prompted or line.startswith("$ ") else "").strip()
            if text:
                yield Piece(page=page, line=number, text=text)


def list_spans(page: Path) -> Iterator[Piece]:
    """Yield inline code. A span may continue on the next line."""
    text = _blank_blocks(page)
    for match in _SPAN.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Piece(page=page, line=line, text=re.sub(r"\s+", " ", match[1]))


def list_links(page: Path) -> Iterator[Piece]:
    text = _SPAN.sub(lambda match: " " * len(match[0]) if "](" in match[0] else match[0], _blank_blocks(page))
    for match in _LINK.finditer(text):
        yield Piece(page=page, line=text.count("\n", 0, match.start()) + 1, text=match[1])


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of headings as GitHub generates them."""
    found = set()
    for line in _blank_blocks(page).split("\n"):
        heading = _HEADING.match(line)
        if heading:
            found.add(make_anchor(heading[1]))
    return found


def make_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")


def _blank_blocks(page: Path) -> str:
    """Return the page with empty code blocks; line numbers stay the same."""
    lines = page.read_text(encoding="utf-8").split("\n")
    for block in list_blocks(page):
        for number in range(block.line - 2, block.line + len(block.lines)):
            lines[number] = ""
    return "\n".join(lines)
