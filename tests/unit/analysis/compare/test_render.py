"""Markdown, JSON and terminal output equal golden files. After an intended change: UPDATE_GOLDEN=1 pytest."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from launcher.analysis.compare.load_run import RunFacts
from launcher.analysis.compare.model import Comparison
from launcher.analysis.compare.render_text import print_comparison, render_markdown
from launcher.core import metrics
from tests.conftest import ROOT
from tests.unit.analysis.compare.made_facts import TRAITS, compare, make_column, make_facts, with_answers

GOLDEN = ROOT / "tests" / "golden" / "compare"


def make_runs() -> list[RunFacts]:
    """Two comparable runs, a crashed one on other data, and one whose name is markup."""
    logged = {
        metrics.TRAIN_LOSS: [3.0, 2.2, 1.6, 1.2],
        metrics.TOKENS_PER_SECOND: [4000.0, 9000.0, 9100.0, 9050.0],
        metrics.DEVICE_MFU: [0.2, 0.41, 0.42, 0.41],
        metrics.PEAK_ALLOCATED_GIB: [15.0, 16.0, 16.0, 16.0],
        metrics.TOKENS_SEEN: [65536.0, 131072.0, 196608.0, 262144.0],
        metrics.TOTAL_SECONDS: [40.0, 48.0, 56.0, 70.0],
    }
    lost = {metrics.GOODPUT: 0.5, metrics.START_SECONDS: 20.0, metrics.EVALUATION_SECONDS: 12.0}
    base = make_facts("base", logged, goodput=lost, settings={("what is learnt", "optimizer.learning_rate"): "0.0002"})
    base = replace(base, columns={**base.columns, metrics.EVAL_LOSS: make_column([1.9, 1.4], [2, 4])})
    better = {**logged, metrics.TRAIN_LOSS: [3.0, 2.0, 1.4, 1.0]}
    high = make_facts("high", better, goodput=lost, settings={("what is learnt", "optimizer.learning_rate"): "0.001"})
    high = replace(high, columns={**high.columns, metrics.EVAL_LOSS: make_column([1.8, 1.3], [2, 4])})
    other = make_facts("other", traits=replace(TRAITS, data_key="f" * 64), status="crashed", num_steps=90)
    foreign = make_facts("a|b `<img src=x>` *c*\n\x1b[31m", {metrics.TRAIN_LOSS: [5.0, 4.0]})
    return [base, high, other, replace(foreign, traits=type(TRAITS)())]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(*make_runs()).model_copy(update={"launcher_version": "0"})


def render_terminal(comparison: Comparison, width: int, *, is_unicode: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, height=25)
    with console.capture() as capture:
        print_comparison(comparison, console, is_unicode=is_unicode)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def check(name: str, text: str) -> None:
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tasks() -> Comparison:
    """Two runs evaluated alike, one with another judge, and one without evaluation."""
    runs = (
        with_answers("low", 0.1, 0.5),
        with_answers("high", 0.1, 0.9),
        with_answers("other", 0.1, 0.7, checker="made | 2.0"),
        make_facts("plain <b>"),
    )
    return compare(*runs).model_copy(update={"launcher_version": "0"})


def test_task_metrics_in_each_format(tasks: Comparison) -> None:
    check("tasks.md", render_markdown(tasks))
    check("tasks.json", tasks.model_dump_json(indent=2) + "\n")
    check("tasks.txt", render_terminal(tasks, width=100))
    assert Comparison.model_validate_json(tasks.model_dump_json()) == tasks


def test_markdown(comparison: Comparison) -> None:
    check("four.md", render_markdown(comparison))


def test_json_and_back(comparison: Comparison) -> None:
    text = comparison.model_dump_json(indent=2) + "\n"
    check("four.json", text)
    assert Comparison.model_validate_json(text) == comparison


def test_terminal(comparison: Comparison) -> None:
    check("four.txt", render_terminal(comparison, width=100))


def test_terminal_without_unicode(comparison: Comparison) -> None:
    text = render_terminal(comparison, width=80, is_unicode=False)
    assert text.isascii()
    assert "1.300 *" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_lines_fit_the_terminal(comparison: Comparison, width: int) -> None:
    lines = render_terminal(comparison, width=width).splitlines()
    long = [line for line in lines if cell_len(line) > width]
    assert long == []


def test_runs_without_metrics_are_listed() -> None:
    nothing = compare(make_facts("empty", {}, status="not started"))
    assert nothing.charts == ()
    assert "No run has logged metrics yet" in render_terminal(nothing, width=80)
    assert "| result | empty |\n| --- | ---: |\n| status | not started |" in render_markdown(nothing)


def test_runs_of_the_same_name_are_distinguished() -> None:
    one, two = make_facts("a"), replace(make_facts("a"), place="elsewhere/a")
    assert [run.name for run in compare(one, two).runs] == ["a (runs/a)", "a (elsewhere/a)"]


def test_host_data_wait_is_shown_only_without_device_data_wait() -> None:
    host = make_facts("cpu", {metrics.DATA_WAIT_SECONDS: [0.1]})
    device = make_facts("gpu", {metrics.DATA_WAIT_SECONDS: [0.1], metrics.DATA_WAIT_SHARE: [0.2]})
    assert [chart.title for chart in compare(host, device).charts] == ["data wait", "host data wait"]
    assert [chart.title for chart in compare(device).charts] == ["data wait"]
    assert "host data wait" not in compare(device).left_out


def test_all_golden_files_are_used() -> None:
    assert {file.name for file in Path(GOLDEN).iterdir()} == {
        f"{name}.{form}" for name in ("four", "tasks") for form in ("md", "json", "txt")
    }
