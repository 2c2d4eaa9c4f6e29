"""`launcher compare` as a user types it: real processes, files, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launcher.analysis.compare import Comparison
from launcher.analysis.compare.load_run import load_run_facts
from tests.conftest import python_path
from tests.forked_python import run_python
from tests.made_runs import MadeRun, write_run

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/ with two runs of neo4j, one of sql, one that was not started, and one that cannot be read."""
    place = tmp_path_factory.mktemp("place")
    runs = place / "runs"
    write_run(runs, MadeRun(run_id="one", num_steps=30))
    write_run(runs, MadeRun(run_id="two", num_steps=30, last_loss=0.8, gpu="a100"))
    write_run(runs, MadeRun(run_id="three", expert="sql", num_steps=30))
    write_run(runs, MadeRun(run_id="fresh", num_steps=0, status=None))
    (runs / "broken").mkdir()
    (runs / "broken" / "plan.json").write_text("{}")
    for age, name in enumerate(("broken", "fresh", "three", "two", "one")):
        os.utime(runs / name / "plan.json", (1_800_000_000 - age, 1_800_000_000 - age))
    return place


def compare(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": python_path()}
    return run_python(["-m", "launcher", "compare", *arguments], cwd=place, env=environment)


def compare_ok(place: Path, *arguments: str) -> str:
    result = compare(place, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def names(text: str) -> list[str]:
    return [run.name for run in Comparison.model_validate_json(text).runs]


def test_page_is_written_and_overwritten(place: Path) -> None:
    for _ in range(2):
        output = compare_ok(place, "one", "two")
        assert output.startswith("compare.html: 2 runs, 9 charts, 0.1 MB\n")
        assert output.endswith("next: open compare.html in a browser; it is one file, which needs no network\n")
    assert (place / "compare.html").read_text().startswith("<!doctype html>\n<!-- made by launcher compare -->")


@pytest.mark.parametrize("form", ["md", "json", "text", "html"])
def test_only_files_of_compare_are_overwritten(place: Path, form: str) -> None:
    file = place / f"out.{form}"
    for _ in range(2):
        compare_ok(place, "one", "--format", form, "-o", str(file))
    file.write_text("somebody's own\n")
    result = compare(place, "one", "--format", form, "-o", str(file))
    assert result.returncode == 2
    assert "was not written by launcher compare" in result.stderr
    assert file.read_text() == "somebody's own\n"
    compare_ok(place, "one", "--format", form, "-o", str(file), "--force")
    assert "somebody" not in file.read_text()


def test_other_formats_are_printed(place: Path) -> None:
    assert compare_ok(place, "one", "two", "--format", "md").startswith("<!-- made by launcher compare -->\n\n# 2 runs")
    assert "validation loss, best" in compare_ok(place, "one", "two", "--format", "text")
    assert compare_ok(place, "one", "-o", "-").endswith("</html>\n")
    comparison = Comparison.model_validate_json(compare_ok(place, "one", "runs/two", "--format", "json"))
    assert [run.card for run in comparison.runs] == ["GeForce RTX 4090", "A100 SXM4 80GB"]
    assert comparison.schema_version == 2


def test_runs_are_selected_by_expert_or_all(place: Path) -> None:
    result = compare(place, "--expert", "neo4j", "--format", "json")
    assert names(result.stdout) == ["fresh", "two", "one"]
    assert "warning: skipped runs/broken: runs/broken/plan.json is not a plan" in result.stderr
    assert names(compare(place, "--all", "--format", "json").stdout) == ["fresh", "three", "two", "one"]
    assert names(compare(place, "--all", "--last", "2", "--format", "json").stdout) == ["fresh", "three"]
    assert names(compare(place, "one", "--all", "--format", "json").stdout) == ["one", "fresh", "three", "two"]
    assert names(compare(place, "two", "runs/two", "one", "--format", "json").stdout) == ["two", "one"]


def test_run_that_was_not_started_is_listed_without_a_curve(place: Path) -> None:
    comparison = Comparison.model_validate_json(compare_ok(place, "fresh", "one", "--format", "json"))
    assert comparison.runs[0].status == "not started"
    assert comparison.runs[0].series == ()
    assert "Not finished" in {caution.title for caution in comparison.cautions}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no runs given\nhint: pass run ids"),
        (("nothing",), "no run called 'nothing'"),
        (("broken",), "is not a plan"),
        (("one", "broken"), "is not a plan"),
        (("--expert", "unknown"), "runs has no run of 'unknown'"),
        (("--all", "--runs-dir", "elsewhere"), "elsewhere has no run\nhint: `launcher train EXPERT` creates one"),
        (("--all", "--last", "0"), "--last 0: must be at least 1"),
        (("one", "--last", "1"), "--last has no effect on runs that are named\nhint: add --expert NAME or --all"),
        (("one", "-o", "missing/compare.html"), "--output missing/compare.html: the folder missing does not exist"),
        (("one", "-o", "runs"), "--output runs: it is a folder"),
        (("one", "-o", "x" * 300), "pass another --output"),
        (("one", "-o", ""), "--output: the path is empty"),
        (("one", "-o", "/dev/null"), "it is a device"),
        (("--all", "--expert", "sql"), "not allowed with"),
    ],
)
def test_invalid_input_is_reported_with_a_hint(place: Path, arguments: tuple[str, ...], message: str) -> None:
    result = compare(place, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_errors_are_json_with_format_json(place: Path) -> None:
    result = compare(place, "nothing", "--format", "json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"] == "no run called 'nothing'"


def test_text_of_oom_fallbacks_is_escaped(tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="a", num_steps=2, oom_fallbacks=("\u202emicro-batch 2\x9b31m",)))
    assert load_run_facts(paths).oom_fallbacks == (r"\u202emicro-batch 2\x9b31m",)


def test_invalid_metrics_line_is_reported(place: Path, tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="torn", num_steps=3))
    paths.metrics.write_text("{}\n")
    result = compare(place, str(paths.root))
    assert result.returncode == 2
    assert "torn/metrics.jsonl: line 1" in result.stderr


def test_warning_that_affects_nothing_is_complete(place: Path, tmp_path: Path) -> None:
    paths = write_run(tmp_path, MadeRun(run_id="damaged", num_steps=20))
    paths.evaluation.write_text("{")
    assert "warning: Evaluations were left out\n" in compare(place, str(paths.root)).stdout
