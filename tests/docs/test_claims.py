"""Figures of the README's table of proof are those of STATUS.md, and each claim is in CLAIMS.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.conftest import ROOT
from tests.docs.markdown import make_anchor

_HEADING = re.compile(r"^(#{1,6}) +(.+?) *$")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAMES = re.compile(r"`[^`]*`|[A-Z]\w+-\d[\w.]*|\b\d+B\b")  # commands, Qwen3-0.6B, ZeRO-2, 8B: not figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    claim: str
    measured: str
    link: str


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def read_section(text: str, anchor: str) -> str:
    """Return the text below the heading with this anchor, up to the next heading."""
    kept, inside = [], False
    for line in text.split("\n"):
        heading = _HEADING.match(line)
        if heading:
            inside = make_anchor(heading[2]) == anchor
        elif inside:
            kept.append(line)
    assert kept, f"no section {anchor}"
    return "\n".join(kept)


def read_cells(text: str) -> list[list[str]]:
    lines = [line for line in text.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def read_rows() -> list[Row]:
    cells = read_cells(read_section(read("README.md"), "proof"))
    return [Row(claim=claim, measured=measured, link=link) for claim, measured, link in cells]


def find_figures(text: str) -> set[str]:
    return set(_NUMBER.findall(_NAMES.sub(" ", text)))


def find_missing(row: Row) -> set[str]:
    """Return the figures of a row that its section of STATUS.md does not have."""
    target = re.fullmatch(r"\[[^\]]+\]\(docs/STATUS\.md#([\w-]+)\)", row.link)
    assert target, f"{row.claim}: must link to a section of docs/STATUS.md"
    return find_figures(row.measured) - set(_NUMBER.findall(read_section(read("docs/STATUS.md"), target[1])))


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: str(row.claim))
def test_figures_of_the_readme_are_in_the_status(row: Row) -> None:
    assert find_missing(row) == set()


def test_a_wrong_figure_is_found() -> None:
    link = "[H200](docs/STATUS.md#memory-prediction-h200-2026-11-15-to-19)"
    assert find_missing(Row(claim="", measured="Qwen3-0.6B: 124 of 125, error 0.28 % and 0.3 %", link=link)) == {
        "125",
        "0.3",
    }


def test_missed_goals_are_in_the_status() -> None:
    (line,) = [line for line in read("README.md").split("\n") if line.startswith("- **Missed goals**")]
    assert find_figures(re.sub(r"\b0\.6B", "", line)) - find_figures(read("docs/STATUS.md")) == set()


def test_every_row_has_a_figure_or_a_comparison() -> None:
    rows = read_rows()
    assert len(rows) >= 6
    assert [row.claim for row in rows if not find_figures(row.measured) and "the same" not in row.measured] == []


def test_claims_of_the_table_are_on_the_page_of_claims() -> None:
    listed = [cells[0] for cells in read_cells(read_section(read("docs/CLAIMS.md"), "proof"))]
    assert listed == [row.claim for row in read_rows()]


def test_the_readme_is_short() -> None:
    assert len(read("README.md").split("\n")) <= 121
