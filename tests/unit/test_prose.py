"""Foreign text in Markdown: it stays text."""

from __future__ import annotations

import pytest

from launcher.prose import code, fenced, inline, prose, table


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("plain words, 2.5 %", "plain words, 2.5 %"),
        ("1. first", r"1\. first"),
        ("- item", r"\- item"),
        ("# head", r"\# head"),
        ("a_b *c* [d](e)", r"a\_b \*c\* \[d\](e)"),
        ("<b>x</b>", r"&lt;b\>x&lt;/b\>"),
        ("two\nlines", "two lines"),
        ("\x1b[31mred", r"\\x1b\[31mred"),
    ],
)
def test_prose_is_one_paragraph_without_markup(text: str, written: str) -> None:
    assert prose(text) == written


def test_within_a_line_a_number_may_stand_first() -> None:
    assert inline("0.003, cosine") == "0.003, cosine"
    assert prose("0.003, cosine") == r"0\.003, cosine"


def test_code_has_no_backticks() -> None:
    assert code("a`b\nc") == "a'b c"


def test_a_fence_is_longer_than_any_in_the_text() -> None:
    assert fenced("a\n````\nb\n", "text") == "`````text\na\n````\nb\n`````"


def test_cells_end_where_they_should() -> None:
    rows = [("a|b", r"a\|b"), (r"a\\|b", "`a|b`")]
    assert table(("x", "y"), rows).splitlines() == [
        "| x | y |",
        "| --- | --- |",
        r"| a\|b | a\|b |",
        r"| a\\\|b | `a\|b` |",
    ]
