"""The commands behind docs/STATUS.md can be typed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from launcher.cli.main import make_parser
from tests.conftest import ROOT

pytest.importorskip("torch", reason="pip install 'expert-launcher[train]'")


sys.path.insert(0, str(ROOT / "benchmarks"))  # as Python does for a script


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("figure", load("figures").FIGURES, ids=lambda figure: figure.name)
def test_commands_of_figures(figure: ModuleType) -> None:
    words = figure.command.format(out="out", minutes="3.0", manifest="manifest.json").split()
    if words[0] == "-m":
        assert words[1] == "launcher"
        make_parser().parse_args(words[2:])
        return
    text = (ROOT / words[0]).read_text() + (ROOT / "benchmarks/pieces.py").read_text()
    assert all(f'"{word}"' in text for word in words[1:] if word.startswith("--"))


def test_cases_of_figures_exist() -> None:
    training = load("training")
    words = next(figure for figure in load("figures").FIGURES if figure.name == "speed").command.split()
    groups = words[words.index("--cases") + 1 : words.index("--out")]
    assert groups
    assert set(groups) <= set(training.GROUPS)
    names = [case.name for group in training.GROUPS.values() for case in group]
    assert len(names) == len(set(names))


def test_commands_of_limited_cards(tmp_path: Path) -> None:
    limited = load("limited")
    for case in limited.CASES:
        arguments = make_parser().parse_args(limited.make_command(case, tmp_path)[3:])
        assert arguments.vram_limit is not None


def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    pieces, limited = load("pieces"), load("limited")
    file = tmp_path / "rows.jsonl"
    first, second, *others = limited.CASES
    pieces.add_row(file, {"case": first.name})
    pieces.add_row(file, {"case": second.name, "error": "out of luck"})
    assert list(pieces.iterate_left(limited.CASES, file, 1.0)) == [second, *others]
    with pytest.raises(SystemExit) as caught:
        list(pieces.iterate_left(limited.CASES, file, -1.0))
    assert caught.value.code == 75
    assert list(pieces.iterate_left([first], file, -1.0)) == [], "nothing is left: the time does not matter"
