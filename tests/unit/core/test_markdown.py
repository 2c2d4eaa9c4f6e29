"""Foreign text in Markdown: it stays text."""

from __future__ import annotations

import pytest

from launcher.core.markdown import code, fenced, inline, prose, table


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
def test_prose_escapes_markup(text: str, written: str) -> None:
    assert prose(text) == written


def test_inline_keeps_a_leading_number() -> None:
    assert inline("0.003, cosine") == "0.003, cosine"
    assert prose("0.003, cosine") == r"0\.003, cosine"


def test_code_has_no_backticks() -> None:
    assert code("a`b\nc") == "a'b c"


def test_fence_is_longer_than_any_in_the_text() -> None:
    assert fenced("a\n````\nb\n", "text") == "`````text\na\n````\nb\n`````"


def test_pipes_in_cells_are_escaped() -> None:
    rows = [("a|b", r"a\|b"), (r"a\\|b", "`a|b`")]
    assert table(("x", "y"), rows).splitlines() == [
        "| x | y |",
        "| --- | --- |",
        r"| a\|b | a\|b |",
        r"| a\\\|b | `a\|b` |",
    ]
