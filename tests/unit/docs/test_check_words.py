"""The word check finds idioms in text and names, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_words import find_idioms, main


@pytest.mark.parametrize(
    ("text", "idiom"),
    [
        ("The plan is " + "tol" + "d twice.", "tol" + "d"),
        ("def step_" + "run" + "gs() -> None:", "run" + "gs"),
        ("it " + "goes " + "on after that", "goes " + "on"),
        ("1,000 " + "tokens a " + "second", "tokens a " + "second"),
    ],
)
def test_idioms_are_found_in_text_and_names(text: str, idiom: str) -> None:
    assert [found for _, found, _ in find_idioms(text)] == [idiom]


@pytest.mark.parametrize("text", ["wrung", "stolen", "a node behind a firewall", "tokens per second", "tokens/s"])
def test_other_words_pass(text: str) -> None:
    assert list(find_idioms(text)) == []


def test_exit_code_and_location(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.md"
    file.write_text("Fine.\n" + "An" + "ew.\n")
    assert main([str(file)]) == 1
    assert "page.md:2: 'An" + "ew'" in capsys.readouterr().err
    file.write_text("Fine.\n")
    assert main([str(file)]) == 0
