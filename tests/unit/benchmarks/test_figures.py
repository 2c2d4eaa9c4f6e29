"""The commands that measure the figures of docs/STATUS.md are valid."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from benchmarks.memory_grid.__main__ import make_parser as make_grid_parser
from benchmarks.peers.quality import make_parser as make_quality_parser
from benchmarks.peers.quality import open_store
from launcher.base_models.catalogue import TINY_BASE_FOLDER
from launcher.cli.main import make_parser
from launcher.plan import load_plan
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


def test_comparison_of_speeds_measures_the_same_case_with_every_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, peer_speed = load("training"), load("peer_speed")
    names = {case.name for group in training.GROUPS.values() for case in group}
    for size in {case.size for case in peer_speed.CASES}:
        cases = [case for case in peer_speed.CASES if case.size == size]
        assert {case.training.name for case in cases if case.tool.startswith("launcher")} <= names
        assert len({(case.training.base, case.training.micro_batch_size) for case in cases}) == 1
        plan, store = peer_speed.make_inputs(cases[-1].training, new_folder(tmp_path / size), TINY_BASE_FOLDER)
        assert load_plan(plan).batch.global_batch_size == cases[-1].training.micro_batch_size
        assert open_store(store).open_split("train")
    rows = [
        {"case": "a", "size": "S", "tool": "launcher", "tokens_per_second": 2000, "peak_gib": 1.5},
        {"case": "b", "size": "S", "tool": "trl", "error": "failed"},
        {"case": "c", "size": "T", "tool": "unsloth", "tokens_per_second": 1000, "peak_gib": 2.5},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    peer_speed.run_table(argparse.Namespace(rows=file))
    assert capsys.readouterr().out.splitlines()[2:] == ["| S | 2,000; 1.5 |  |", "| T |  | 1,000; 2.5 |"]


def test_figure_that_is_out_of_time_ends_with_its_processes(tmp_path: Path) -> None:
    figures = load("figures")
    script = tmp_path / "figure.py"
    script.write_text(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    figure = figures.Figure(name="slow", description="", command=str(script))
    given = argparse.Namespace(manifest=None, base=None, data=None)
    assert figures.run_figure(figure, given, tmp_path, time.monotonic() + 3) == 75
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path
