"""The commands that measure the figures of docs/STATUS.md are valid."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.memory_grid.__main__ import make_parser as make_grid_parser
from benchmarks.peers.quality import make_parser as make_quality_parser
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
def test_commands_of_figures_are_valid(figure: ModuleType) -> None:
    inputs = {"manifest": "manifest.json", "base": "base", "data": "data"}
    words = figure.command.format(out="out", minutes="3.0", **inputs).split()
    if words[0] == "-m":
        parsers = {
            "launcher": make_parser,
            "benchmarks.memory_grid": make_grid_parser,
            "benchmarks.peers.quality": make_quality_parser,
        }
        parsers[words[1]]().parse_args(words[2:])
        return
    text = (ROOT / words[0]).read_text() + (ROOT / "benchmarks/resumable_cases.py").read_text()
    assert all(f'"{word}"' in text for word in words[1:] if word.startswith("--"))


def test_cases_of_figures_exist() -> None:
    training = load("training")
    words = next(figure for figure in load("figures").FIGURES if figure.name == "speed").command.split()
    groups = words[words.index("--cases") + 1 : words.index("--out")]
    assert groups
    assert set(groups) <= set(training.GROUPS)
    names = [case.name for group in training.GROUPS.values() for case in group]
    assert len(names) == len(set(names))


def test_commands_of_vram_limit_are_valid(tmp_path: Path) -> None:
    vram_limit = load("vram_limit")
    for case in vram_limit.CASES:
        arguments = make_parser().parse_args(vram_limit.make_command(case, tmp_path)[3:])
        assert arguments.vram_limit is not None


def test_measured_cases_are_skipped(tmp_path: Path) -> None:
    resumable, cases = load("resumable_cases"), load("vram_limit").CASES
    file = tmp_path / "rows.jsonl"
    first, second, *others = cases
    resumable.add_row(file, {"case": first.name})
    resumable.add_row(file, {"case": second.name, "error": "failed"})
    assert list(resumable.iterate_unmeasured(cases, file, 1.0)) == [second, *others]
    with pytest.raises(SystemExit) as caught:
        list(resumable.iterate_unmeasured(cases, file, -1.0))
    assert caught.value.code == 75
    assert list(resumable.iterate_unmeasured([first], file, -1.0)) == [], "no case left: the time limit does not matter"
