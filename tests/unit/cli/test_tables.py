"""Tables print foreign text literally: markup and control characters have no effect."""

from __future__ import annotations

import pytest

from launcher.cli.tables import print_table


@pytest.mark.parametrize("text", ["[red]danger[/red]", "\\[bold]x", "[/]", ":smile:", "a[0].b"])
def test_markup_in_foreign_text_is_not_interpreted(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key", "value"), [(text, text)])
    assert capsys.readouterr().out.splitlines()[1].split() == [text, text]


def test_control_characters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key",), [("\x1b[31mred\r",)])
    assert capsys.readouterr().out.splitlines()[1].strip() == "\\x1b[31mred\\r"
